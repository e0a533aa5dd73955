"""append_once: entries and the writer's position are one atomic step, so that repeating it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any, Self, TypeVar

from millstream.broker.context import ROW_WORDS, Context, Limits
from millstream.broker.keys import beside
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_word,
    entry_id,
    entry_ids,
    field_words,
    name_word,
    sequence,
    trim_words,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.steps.once.writer import UNKNOWN, WEEK_MS, Appended, Digest, RowsMissing
from millstream.broker.steps.retention.call import keep_short
from millstream.broker.steps.script import script
from millstream.errors import IdTooSmall, InvalidArgument, NonDeterministicReplay, ServerError, StaleWriter
from millstream.model import EntryId, TrimPolicy
from millstream.wire import Command, Conversation, to_name

R = TypeVar("R")
GREATEST = 2**53 - 1
"""Versions and positions beyond this do not fit into a script's numbers."""


def append_once(
    context: Context,
    stream: Name,
    writer: Name,
    version: int,
    position: int,
    entries: Sequence[Fields],
    *,
    partition: Name = "0",
    digest: Digest | None = None,
    forget_after_ms: int = WEEK_MS,
    trim: TrimPolicy | None = None,
    durability: Wanted = None,
) -> Conversation[Appended]:
    """See ``Broker.append_once``."""
    if digest is not None and not isinstance(digest, Digest):
        raise InvalidArgument("digest", digest, "None, or the writer's Digest()")
    rolling = digest or (Digest() if position == 0 else None)
    once = Once(
        stream,
        writer,
        version,
        partition=partition,
        position=position,
        digest=rolling.copy() if rolling is not None else None,
        forget_after_ms=forget_after_ms,
        trim=trim,
        durability=durability,
    )
    appended = yield from once.append(context, entries)
    if digest is not None and once.digest is not None:
        digest.adopt(once.digest)
    return appended


class Writer:
    """Names one partition of one writer, and knows what its marker may say."""

    def __init__(
        self, stream: Name, writer: Name, version: int, *, partition: Name, forget_after_ms: int, durability: Wanted
    ) -> None:
        self._stream = name_word(stream, "stream")
        self._writer = name_word(writer, "writer")
        self._markers = beside(self._stream, b"once:" + self._writer)
        self._partition = name_word(partition, "partition")
        self._version = _number(version, "version")
        self._ttl = count_word(forget_after_ms, "forget_after_ms")
        self._durability = durability_of(durability)
        self.position = 0

    @property
    def _name(self) -> str:
        return f"{to_name(self._writer)!r} (partition {to_name(self._partition)!r})"

    def _stale(self, version: int) -> StaleWriter:
        return StaleWriter(
            f"writer {self._name} has version {int(self._version)}, but version {version} has written since. "
            "This one was replaced: stop it.",
            version=int(self._version),
            recorded=version,
        )

    def _miscounted(self, told: int, given: int) -> ServerError:
        return ServerError(f"ERR append_once told {told} ids for {given} rows of writer {self._name}")

    def _different(self) -> NonDeterministicReplay:
        return NonDeterministicReplay(
            f"writer {self._name} repeats version {int(self._version)} with other rows than the stored ones, "
            f"at or before row {self.position}. Make the source repeat its rows exactly, or use append_unique.",
            position=self.position,
        )


class BatchWriter(Writer):
    """A writer of batches that are stored whole or not at all, each under a token of its own.

    The token stands in the marker in the digest's place. So a batch that is given again is known by its token, and by
    nothing else: a marker that stands where it should, but tells another token, proves nothing about these rows.
    """

    def __init__(
        self, stream: Name, writer: Name, version: int, *, partition: Name, forget_after_ms: int, durability: Wanted
    ) -> None:
        super().__init__(
            stream, writer, version, partition=partition, forget_after_ms=forget_after_ms, durability=durability
        )
        self._before = UNKNOWN
        """The token of the batch before."""

    def append(self, context: Context, rows: Sequence[list[bytes]], token: bytes) -> Conversation[Appended]:
        """Stores the batch, or finds that it is stored. This writer moves on only with evidence for one of the two.

        Atomic. Found stored, only the last row's id is known. Raises NonDeterministicReplay where the marker tells of
        other rows, RowsMissing where it has forgotten some, StaleWriter.
        """
        argv = [self._partition, self._version, b"%d" % self.position, self._before, token, self._ttl, b"0"]
        for row in rows:
            argv.append(b"%d" % len(row))
            argv += row
        keys = (self._stream, self._markers)
        step = script("append_once")
        reply: list[Any]
        if self._durability is None:
            reply = yield Command((b"EVALSHA", step.sha, b"2", *keys, *argv), self._stream, repeatable=True)
        else:
            reply = yield from run_script_durably(context, step, keys, argv, self._durability, repeatable=True)
        if reply[0] == b"OK" and len(reply) == len(rows) + 1:
            appended = Appended([*entry_ids(reply[1:])], len(rows), 0)
            if context.max_stream_len is not None:
                yield from keep_short(context, self._stream, len(rows))
        else:
            last = self._proved(reply, len(rows), token)
            appended = Appended([*[None] * (len(rows) - 1), last], 0, len(rows))
        # Nothing may fail from here on: given again, the batch would be stored twice.
        self.position += len(rows)
        self._before = token
        return appended

    def _proved(self, reply: list[Any], count: int, token: bytes) -> EntryId:
        """The last row's id, where the refusal proves that the batch is stored. Everything else is an error."""
        if reply[0] == b"STALE":
            raise self._stale(int(reply[1]))
        if reply[0] == b"ROWS":
            rows, digest, last = int(reply[1]), reply[2], reply[3]
            if rows < self.position:
                raise RowsMissing(to_name(self._writer), rows=rows, position=self.position)
            if rows == self.position + count and digest == token:
                return entry_id(last)
        if reply[0] == b"OK":
            raise self._miscounted(len(reply) - 1, count)
        raise self._different()


class Once(Writer):
    """One writer: where it is, and what it knows of the stream's marker. Pure but for ``yield``."""

    def __init__(
        self,
        stream: Name,
        writer: Name,
        version: int,
        *,
        partition: Name = "0",
        position: int = 0,
        digest: Digest | None = None,
        forget_after_ms: int = WEEK_MS,
        trim: TrimPolicy | None = None,
        durability: Wanted = None,
    ) -> None:
        super().__init__(
            stream, writer, version, partition=partition, forget_after_ms=forget_after_ms, durability=durability
        )
        _number(position, "position")
        words = trim_words(trim)
        self._trim = (b"%d" % len(words), *words)
        self.position = position
        self.digest = digest
        self._known: tuple[int, bytes, bytes] | None = None
        """Rows, digest and last id of the marker, as the stream last told."""

    def append(self, context: Context, entries: Sequence[Fields]) -> Conversation[Appended]:
        many = sequence(entries, "entries", "mappings from field names to values")
        return (yield from self.append_rows(context, [field_words(fields, context.limits) for fields in many]))

    def append_rows(self, context: Context, rows: Sequence[list[bytes]]) -> Conversation[Appended]:
        """``append`` for bulk writers, who have each row as words already: names and values in turn."""
        return (yield from self.whole(lambda ahead: ahead._append_rows(context, rows)))

    def whole(self, append: Callable[[Self], Conversation[R]]) -> Conversation[R]:
        """Lets a copy of this writer go ahead, which takes its place when everything is stored.

        Whatever ends it before (an error, a cancellation, nobody who goes on), this writer stands where it stood, and
        the same rows may be given again.
        """
        ahead = copy(self)
        ahead.digest = self.digest.copy() if self.digest is not None else None
        result = yield from append(ahead)
        self.position, self.digest, self._known = ahead.position, ahead.digest, ahead._known
        return result

    def _append_rows(self, context: Context, rows: Sequence[list[bytes]]) -> Conversation[Appended]:
        if max(map(len, rows), default=0) > ROW_WORDS:
            raise InvalidArgument("entries", "a row", f"at most {ROW_WORDS // 2} fields a row")
        ids: list[EntryId | None] = []
        skipped = self._skip(rows, ids)
        for chunk in chunks(rows[skipped:], context.limits):
            todo = chunk
            while todo:
                reply, ahead = yield from self._step(context, todo)
                if reply[0] == b"OK":
                    if len(reply) != len(todo) + 1:
                        raise self._miscounted(len(reply) - 1, len(todo))
                    ids += entry_ids(reply[1:])
                    self.position += len(todo)
                    self.digest = ahead
                    break
                self._refused(reply)
                skipped_now = self._skip(todo, ids)
                skipped += skipped_now
                todo = todo[skipped_now:]
        new = len(rows) - skipped
        if new and context.max_stream_len is not None:
            yield from keep_short(context, self._stream, new)
        return Appended(ids, new, skipped)

    def finish(self, context: Context) -> Conversation[None]:
        """All rows were given. Raises NonDeterministicReplay where the stream holds more rows of this version."""
        marker: bytes | None = yield Command((b"HGET", self._markers, self._partition), self._stream, repeatable=True)
        version, rows = map(int, marker.split(b" ")[:2]) if marker else (0, 0)
        if marker is not None and version > int(self._version):
            raise self._stale(version)
        if marker is None or version < int(self._version):
            rows = 0
        if rows > self.position:
            raise NonDeterministicReplay(
                f"writer {self._name} brought {self.position} rows of version {int(self._version)}, "
                f"but {rows} are stored. Make the source repeat its rows exactly, or use a new version.",
                rows=rows,
            )
        if rows < self.position:
            raise RowsMissing(to_name(self._writer), rows=rows, position=self.position)

    # --- the steps --------------------------------------------------------------------------------------------------

    def _step(self, context: Context, rows: Sequence[list[bytes]]) -> Conversation[tuple[list[Any], Digest | None]]:
        """The script's answer, and the digest after these rows."""
        ahead = self.digest.copy() if self.digest is not None else None
        if ahead is not None:
            ahead.add(rows)
        after = ahead.word() if ahead is not None else UNKNOWN
        argv = [
            *(self._partition, self._version, b"%d" % self.position),
            *(self.digest.word() if self.digest is not None else UNKNOWN, after, self._ttl, *self._trim),
        ]
        for row in rows:
            argv.append(b"%d" % len(row))
            argv += row
        reply: list[Any] = yield from run_script_durably(
            context, script("append_once"), (self._stream, self._markers), argv, self._durability, repeatable=True
        )
        return reply, ahead

    def _refused(self, reply: list[Any]) -> None:
        """Learns where the marker is, or raises."""
        if reply[0] == b"STALE":
            raise self._stale(int(reply[1]))
        if reply[0] == b"DIGEST":
            raise self._different()
        self._known = int(reply[1]), reply[2], reply[3]
        if self._known[0] < self.position:
            raise RowsMissing(to_name(self._writer), rows=self._known[0], position=self.position)

    def _skip(self, rows: Sequence[list[bytes]], ids: list[EntryId | None]) -> int:
        """Passes over the rows that the marker says are stored; compares digests where the stored ones end."""
        if self._known is None or self._known[0] <= self.position:
            return 0
        stored, digest, last = self._known
        count = min(stored - self.position, len(rows))
        self._move(rows[:count])
        ids += [None] * count
        if self.position == stored:
            if self.digest is not None and digest != UNKNOWN and self.digest.word() != digest:
                raise self._different()
            if count:
                ids[-1] = entry_id(last)
        return count

    def _move(self, rows: Sequence[list[bytes]]) -> None:
        self.position += len(rows)
        if self.digest is not None:
            self.digest.add(rows)


class OnceAt(Once):
    """A writer whose rows are ``[id, name, value, ...]``. The id is part of the row, and of the digest.

    Raises IdTooSmall, having written nothing of the step, where an id is not greater than the one before it.
    """

    def _step(self, context: Context, rows: Sequence[list[bytes]]) -> Conversation[tuple[list[Any], Digest | None]]:
        ahead = self.digest.copy() if self.digest is not None else None
        if ahead is not None:
            ahead.add(rows)
        argv = [
            *(self._partition, self._version, b"%d" % self.position),
            self.digest.word() if self.digest is not None else UNKNOWN,
            *(ahead.word() if ahead is not None else UNKNOWN, self._ttl),
        ]
        for row in rows:
            argv.append(b"%d" % (len(row) - 1))
            argv += row
        reply: list[Any] = yield from run_script_durably(
            context, script("append_once_at"), (self._stream, self._markers), argv, self._durability, repeatable=True
        )
        return reply, ahead

    def _refused(self, reply: list[Any]) -> None:
        if reply[0] == b"ID":
            raise IdTooSmall(
                f"id {reply[1].decode()} for stream {to_name(self._stream)!r} is not greater than {reply[2].decode()}, "
                "and nothing of this step was written. Bring a stream's rows in the order of their ids, by one writer."
            )
        super()._refused(reply)


def chunks(rows: Sequence[list[bytes]], limits: Limits) -> Iterator[Sequence[list[bytes]]]:
    """Pieces that a script may carry, bounded by count and by size."""
    if sum(map(len, chain.from_iterable(rows))) <= limits.script_bytes:
        for first in range(0, len(rows), limits.script_entries):
            yield rows[first : first + limits.script_entries]
        return
    start = size = 0
    for index, row in enumerate(rows):
        row_size = sum(map(len, row))
        if index > start and (index - start >= limits.script_entries or size + row_size > limits.script_bytes):
            yield rows[start:index]
            start, size = index, 0
        size += row_size
    if start < len(rows):
        yield rows[start:]


def _number(value: int, argument: str) -> bytes:
    if type(value) is not int or not 0 <= value <= GREATEST:
        raise InvalidArgument(argument, value, f"a whole number from 0 to {GREATEST}")
    return b"%d" % value
