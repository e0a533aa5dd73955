"""``append_once``: entries and the writer's position are stored in one atomic step, so that a repeated call adds
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any, Self, TypeVar

from millstream.broker.context import MAX_ARGS_PER_ROW, Context, Limits
from millstream.broker.failures import typed_error
from millstream.broker.keys import companion_key
from millstream.broker.operations.conversion import (
    Fields,
    Name,
    count_arg,
    entry_id,
    entry_ids,
    field_args,
    name_arg,
    sequence,
    trim_args,
)
from millstream.broker.operations.durability import Wanted, durability_of, run_script_durably
from millstream.broker.scripts.append_once.writer import UNKNOWN, WEEK_MS, Appended, Digest, RowsMissing
from millstream.broker.scripts.retention.call import keep_short
from millstream.broker.scripts.script import script
from millstream.errors import (
    IdTooSmall,
    InvalidArgument,
    MillstreamError,
    NonDeterministicReplay,
    ServerError,
    StaleWriter,
)
from millstream.model import EntryId, TrimPolicy
from millstream.wire import Batch, Command, ErrorReply, Operation, to_name

R = TypeVar("R")
MAX_NUMBER = 2**53 - 1
"""The maximum of versions and positions: the greatest integer that a Lua number holds exactly."""


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
) -> Operation[Appended]:
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
    """One partition of one writer, and the errors that its marker can cause."""

    def __init__(
        self, stream: Name, writer: Name, version: int, *, partition: Name, forget_after_ms: int, durability: Wanted
    ) -> None:
        self._stream = name_arg(stream, "stream")
        self._writer = name_arg(writer, "writer")
        self._markers = companion_key(self._stream, b"once:" + self._writer)
        self._partition = name_arg(partition, "partition")
        self._version = _number(version, "version")
        self._ttl = count_arg(forget_after_ms, "forget_after_ms")
        self._durability = durability_of(durability)
        self.position = 0

    @property
    def _name(self) -> str:
        return f"{to_name(self._writer)!r} (partition {to_name(self._partition)!r})"

    def _stale(self, version: int) -> StaleWriter:
        return StaleWriter(
            f"writer {self._name} has version {int(self._version)}, but version {version} has written since. "
            "This writer was replaced: stop it.",
            version=int(self._version),
            recorded=version,
        )

    def _miscounted(self, ids: int, rows: int) -> ServerError:
        return ServerError(f"ERR append_once returned {ids} ids for {rows} rows of writer {self._name}")

    def _different(self) -> NonDeterministicReplay:
        return NonDeterministicReplay(
            f"writer {self._name} repeats version {int(self._version)} with other rows than the stored ones, "
            f"at or before row {self.position}. Make the source repeat its rows exactly, or use append_unique.",
            position=self.position,
        )


class BatchWriter(Writer):
    """A writer of batches that are stored completely or not at all, each identified by a batch token.

    The marker holds the token instead of a digest. A repeated batch is recognized only by its token: a marker at the
    right position with another token proves nothing about these rows.
    """

    def __init__(
        self, stream: Name, writer: Name, version: int, *, partition: Name, forget_after_ms: int, durability: Wanted
    ) -> None:
        super().__init__(
            stream, writer, version, partition=partition, forget_after_ms=forget_after_ms, durability=durability
        )
        self._keys = (self._stream, self._markers)
        self._before = UNKNOWN
        """The token of the previous batch."""

    def append(self, context: Context, rows: Sequence[list[bytes]], token: bytes) -> Operation[Appended]:
        """Stores the batch, or verifies that it is stored already. Otherwise the writer's position does not change.

        Atomic. If the batch was stored already, only the id of its last row is known. Raises NonDeterministicReplay if
        the marker belongs to other rows, RowsMissing if earlier rows are missing, StaleWriter.
        """
        keys, argv = self._keys, self._argv(rows, token)
        append_script = script("append_once")
        reply: list[Any]
        if self._durability is None:
            reply = yield Command((b"EVALSHA", append_script.sha, b"2", *keys, *argv), self._stream, repeatable=True)
        else:
            reply = yield from run_script_durably(context, append_script, keys, argv, self._durability, repeatable=True)
        appended = self._appended(reply, rows, token)
        if appended.added and context.max_stream_len is not None:
            yield from keep_short(context, self._stream, len(rows))
        self._advance(rows, token)
        return appended

    def _argv(self, rows: Sequence[list[bytes]], token: bytes) -> list[bytes]:
        argv = [self._partition, self._version, b"%d" % self.position, self._before, token, self._ttl, b"0"]
        for row in rows:
            argv.append(b"%d" % len(row))
            argv += row
        return argv

    def _appended(self, reply: list[Any], rows: Sequence[list[bytes]], token: bytes) -> Appended:
        """Reads a reply. Raises if it does not prove that the rows are stored."""
        if reply[0] == b"OK" and len(reply) == len(rows) + 1:
            return Appended([*entry_ids(reply[1:])], len(rows), 0)
        last = self._stored_last_id(reply, len(rows), token)
        return Appended([*[None] * (len(rows) - 1), last], 0, len(rows))

    def _advance(self, rows: Sequence[list[bytes]], token: bytes) -> None:
        """Nothing may fail after the rows were found stored: a repeated batch would be stored twice."""
        self.position += len(rows)
        self._before = token

    def _stored_last_id(self, reply: list[Any], count: int, token: bytes) -> EntryId:
        """The id of the last row, if the refusal proves that the batch is stored; otherwise raises."""
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


def append_batches(
    context: Context, batches: Sequence[tuple[BatchWriter, Sequence[list[bytes]], bytes]]
) -> Operation[list[Appended | MillstreamError]]:
    """``append`` of several writers, each to a stream of its own, in one round trip: the writers, their rows and batch
    tokens. Returns what each would return, or the error that it would raise; it does not affect the others.

    For writers without a durability.
    """
    head = (b"EVALSHA", script("append_once").sha, b"2")
    commands = [(*head, *writer._keys, *writer._argv(rows, token)) for writer, rows, token in batches]
    replies = yield Batch(commands, keys=[writer._stream for writer, _, _ in batches], repeatable=True)
    results: list[Appended | MillstreamError] = []
    for (writer, rows, token), reply in zip(batches, replies, strict=True):
        try:
            if isinstance(reply, (ErrorReply, MillstreamError)):
                raise typed_error(reply) if isinstance(reply, ErrorReply) else reply
            results.append(writer._appended(reply, rows, token))
        except MillstreamError as error:
            results.append(error)
    if context.max_stream_len is not None:
        for at, (writer, rows, _) in enumerate(batches):
            appended = results[at]
            if isinstance(appended, Appended) and appended.added:
                try:
                    yield from keep_short(context, writer._stream, len(rows))
                except MillstreamError as error:
                    results[at] = error
    for (writer, rows, token), result in zip(batches, results, strict=True):
        if isinstance(result, Appended):
            writer._advance(rows, token)
    return results


class Once(Writer):
    """One writer: its position, and what it knows of the stream's marker. Pure except for ``yield``."""

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
        args = trim_args(trim)
        self._trim = (b"%d" % len(args), *args)
        self.position = position
        self.digest = digest
        self._known: tuple[int, bytes, bytes] | None = None
        """Rows, digest and last id of the marker, from the last refusal."""

    def append(self, context: Context, entries: Sequence[Fields]) -> Operation[Appended]:
        """Appends entries; rows that are stored already are skipped."""
        rows = sequence(entries, "entries", "mappings from field names to values")
        return (yield from self.append_rows(context, [field_args(fields, context.limits) for fields in rows]))

    def append_rows(self, context: Context, rows: Sequence[list[bytes]]) -> Operation[Appended]:
        """``append`` for rows that are encoded already: names and values in turn."""
        return (yield from self.advance_on_success(lambda ahead: ahead._append_rows(context, rows)))

    def advance_on_success(self, append: Callable[[Self], Operation[R]]) -> Operation[R]:
        """Runs ``append`` on a copy of this writer, and takes over its state when everything is stored.

        If it ends earlier (an error, a cancellation), this writer keeps its position, and the same rows may be given
        again.
        """
        ahead = copy(self)
        ahead.digest = self.digest.copy() if self.digest is not None else None
        result = yield from append(ahead)
        self.position, self.digest, self._known = ahead.position, ahead.digest, ahead._known
        return result

    def _append_rows(self, context: Context, rows: Sequence[list[bytes]]) -> Operation[Appended]:
        if max(map(len, rows), default=0) > MAX_ARGS_PER_ROW:
            raise InvalidArgument("entries", "a row", f"at most {MAX_ARGS_PER_ROW // 2} fields a row")
        ids: list[EntryId | None] = []
        skipped = self._skip(rows, ids)
        for chunk in chunks(rows[skipped:], context.limits):
            todo = chunk
            while todo:
                reply, ahead = yield from self._run_append(context, todo)
                if reply[0] == b"OK":
                    if len(reply) != len(todo) + 1:
                        raise self._miscounted(len(reply) - 1, len(todo))
                    ids += entry_ids(reply[1:])
                    self.position += len(todo)
                    self.digest = ahead
                    break
                self._handle_refusal(reply)
                skipped_now = self._skip(todo, ids)
                skipped += skipped_now
                todo = todo[skipped_now:]
        new = len(rows) - skipped
        if new and context.max_stream_len is not None:
            yield from keep_short(context, self._stream, new)
        return Appended(ids, new, skipped)

    def finish(self, context: Context) -> Operation[None]:
        """Checks that all stored rows were given. Raises NonDeterministicReplay if the stream holds more rows of this
        version.
        """
        marker: bytes | None = yield Command((b"HGET", self._markers, self._partition), self._stream, repeatable=True)
        version, rows = map(int, marker.split(b" ")[:2]) if marker else (0, 0)
        if marker is not None and version > int(self._version):
            raise self._stale(version)
        if marker is None or version < int(self._version):
            rows = 0
        if rows > self.position:
            raise NonDeterministicReplay(
                f"writer {self._name} gave {self.position} rows of version {int(self._version)}, "
                f"but {rows} are stored. Make the source repeat its rows exactly, or use a new version.",
                rows=rows,
            )
        if rows < self.position:
            raise RowsMissing(to_name(self._writer), rows=rows, position=self.position)

    def _run_append(self, context: Context, rows: Sequence[list[bytes]]) -> Operation[tuple[list[Any], Digest | None]]:
        """Runs the script; returns its reply and the digest after these rows."""
        ahead = self.digest.copy() if self.digest is not None else None
        if ahead is not None:
            ahead.add(rows)
        after = ahead.hexdigest() if ahead is not None else UNKNOWN
        argv = [
            self._partition,
            self._version,
            b"%d" % self.position,
            self.digest.hexdigest() if self.digest is not None else UNKNOWN,
            after,
            self._ttl,
            *self._trim,
        ]
        for row in rows:
            argv.append(b"%d" % len(row))
            argv += row
        reply: list[Any] = yield from run_script_durably(
            context,
            script("append_once"),
            (self._stream, self._markers),
            argv,
            self._durability,
            repeatable=True,
            fence=context.fence,
        )
        return reply, ahead

    def _handle_refusal(self, reply: list[Any]) -> None:
        """Records the position of the marker, or raises."""
        if reply[0] == b"STALE":
            raise self._stale(int(reply[1]))
        if reply[0] == b"DIGEST":
            raise self._different()
        self._known = int(reply[1]), reply[2], reply[3]
        if self._known[0] < self.position:
            raise RowsMissing(to_name(self._writer), rows=self._known[0], position=self.position)

    def _skip(self, rows: Sequence[list[bytes]], ids: list[EntryId | None]) -> int:
        """Skips the rows that are stored according to the marker; compares digests at the end of the stored rows."""
        if self._known is None or self._known[0] <= self.position:
            return 0
        stored, digest, last = self._known
        count = min(stored - self.position, len(rows))
        self._advance(rows[:count])
        ids += [None] * count
        if self.position == stored:
            if self.digest is not None and digest != UNKNOWN and self.digest.hexdigest() != digest:
                raise self._different()
            if count:
                ids[-1] = entry_id(last)
        return count

    def _advance(self, rows: Sequence[list[bytes]]) -> None:
        self.position += len(rows)
        if self.digest is not None:
            self.digest.add(rows)


class OnceAt(Once):
    """A writer of rows ``[id, name, value, ...]`` with given ids. The id is part of the row and of the digest.

    Raises IdTooSmall if an id is not greater than the previous one; then nothing of the chunk is written.
    """

    def _run_append(self, context: Context, rows: Sequence[list[bytes]]) -> Operation[tuple[list[Any], Digest | None]]:
        ahead = self.digest.copy() if self.digest is not None else None
        if ahead is not None:
            ahead.add(rows)
        argv = [
            self._partition,
            self._version,
            b"%d" % self.position,
            self.digest.hexdigest() if self.digest is not None else UNKNOWN,
            ahead.hexdigest() if ahead is not None else UNKNOWN,
            self._ttl,
        ]
        for row in rows:
            argv.append(b"%d" % (len(row) - 1))
            argv += row
        reply: list[Any] = yield from run_script_durably(
            context,
            script("append_once_at"),
            (self._stream, self._markers),
            argv,
            self._durability,
            repeatable=True,
            fence=context.fence,
        )
        return reply, ahead

    def _handle_refusal(self, reply: list[Any]) -> None:
        if reply[0] == b"ID":
            raise IdTooSmall(
                f"id {reply[1].decode()} for stream {to_name(self._stream)!r} is not greater than {reply[2].decode()}, "
                "and nothing of this chunk was written. Append rows in the order of their ids, from one writer."
            )
        super()._handle_refusal(reply)


def chunks(rows: Sequence[list[bytes]], limits: Limits) -> Iterator[Sequence[list[bytes]]]:
    """Splits rows into chunks for a script, limited by count and by size."""
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
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise InvalidArgument(argument, value, f"a whole number from 0 to {MAX_NUMBER}")
    return b"%d" % value
