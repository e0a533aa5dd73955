"""Dead letters: list them, group them by error, replay them, delete them.

A replay appends the original entry and then removes the dead letter. The append is unique by the id of the dead letter,
so a replay that was interrupted in between adds nothing twice when it is repeated. A dead letter is replayed only if a
group exists that will handle it. Otherwise it stays, and the result says so.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from millstream.broker import companion_key
from millstream.broker.context import MAX_ARGS_PER_ROW, Context
from millstream.broker.operations.conversion import add_fields
from millstream.errors import InvalidArgument, MillstreamError, NoSuchStream
from millstream.messaging import tracing
from millstream.messaging.failure import DeadLetterDetails, marked, original, read_details
from millstream.messaging.middleware.throttle import RateLimit
from millstream.messaging.settings import check_topic
from millstream.model import MAX_ID, MIN_ID, Entry, EntryId
from millstream.wire import Command, Operation, to_bytes, to_name

if TYPE_CHECKING:
    from millstream.broker import Broker


_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_HEX = re.compile(r"\b(?:0x[0-9a-fA-F]+|(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,})\b")
_NUMBER = re.compile(r"\d+(?:[.,:\-]\d+)*")
_LIMIT = 200


def signature(error: str) -> str:
    """``order 4711 not found`` and ``order 4712 not found`` are one failure: ``order # not found``."""
    first_line = error.strip().partition("\n")[0][: 4 * _LIMIT]
    return _NUMBER.sub("#", _HEX.sub("#", _UUID.sub("#", first_line)))[:_LIMIT]


@dataclass(slots=True)
class FailureGroup:
    error_type: str
    error: str
    """The signature of their error text."""
    first: EntryId
    example: str
    """The complete text of one of them."""
    count: int = 0
    last: EntryId = MIN_ID
    groups: set[str] = field(default_factory=set)
    """The consumer groups that dead-lettered them."""

    def add(self, id: EntryId, group: str) -> None:
        self.count += 1
        self.last = max(self.last, id)
        self.first = min(self.first, id)
        if group:
            self.groups.add(group)


PAGE = 200
MARKS = 2
"""The fields that a replay adds to an entry."""
MAX_MARKS_BYTES = 64 * 1024
"""More than their names and values have."""


class NoSuchDeadLetter(MillstreamError):
    """There is no dead letter with this id (any more)."""

    def __init__(self, stream: str, id: EntryId) -> None:
        super().__init__(f"{stream!r} has no entry {id}. It may have been replayed or purged.", stream=stream, id=id)


@dataclass(frozen=True, slots=True)
class PipelineFailure:
    """Why a pipeline dead-lettered an event. Such dead letters are not entries of a stream."""

    pipeline: str
    stage: str
    event: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """``details``: the reason and the origin; None if the entry was not written by a subscriber, but by a pipeline."""

    id: EntryId
    fields: dict[bytes, bytes]
    """The entry as its producer wrote it."""
    details: DeadLetterDetails | None

    @property
    def failure(self) -> PipelineFailure | None:
        """The details that a pipeline wrote; None in every other dead letter."""
        if self.details is not None or not self.fields.keys() >= {b"pipeline", b"stage", b"id", b"reason"}:
            return None
        return PipelineFailure(*(to_name(self.fields[name]) for name in (b"pipeline", b"stage", b"id", b"reason")))

    @property
    def error_type(self) -> str:
        """The error's type; in a pipeline's dead letter, the stage that failed."""
        if self.details is not None:
            return self.details.error_type
        return self.failure.stage if self.failure is not None else ""

    @property
    def error(self) -> str:
        if self.details is not None:
            return self.details.error
        return self.failure.reason if self.failure is not None else ""

    @property
    def group(self) -> str:
        return self.details.group if self.details is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects dead letters. Criteria that are None or empty are ignored; without any, all dead letters are selected."""

    ids: frozenset[EntryId] = frozenset()
    error_type: str | None = None
    """The type's full name, or its last part."""
    contains: str | None = None
    """A text in the error's message, in any case."""
    group: str | None = None
    signature: str | None = None
    """A group of similar failures, as ``by_error`` returns it."""
    after: EntryId | None = None
    before: EntryId | None = None

    def matches(self, letter: DeadLetter) -> bool:
        error_type, error, group = letter.error_type, letter.error, letter.group
        return (
            (not self.ids or letter.id in self.ids)
            and (self.error_type is None or self.error_type in (error_type, error_type.rpartition(".")[2]))
            and (self.contains is None or self.contains.lower() in error.lower())
            and (self.group is None or self.group == group)
            and (self.signature is None or self.signature == signature(error))
            and (self.after is None or letter.id > self.after)
            and (self.before is None or letter.id < self.before)
        )


EVERYTHING = Selection()


@dataclass(slots=True)
class Replayed:
    """``added``: replayed. ``already``: replayed earlier, by an interrupted replay. ``left``: kept, because they do not
    name their stream. With ``dry_run`` nothing was changed, and ``added`` is the number that would be replayed."""

    added: int = 0
    already: int = 0
    left: int = 0
    without_handler: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many are kept because no group would handle them, by stream and missing group ("": the stream has none)."""
    streams: dict[str, int] = field(default_factory=dict)
    dry_run: bool = False


class DeadLetters:
    """The dead letters of one stream; ``dlq``: their stream, if it is not the companion key."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        *,
        dlq: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        check_topic(stream)
        self._broker = broker
        self._stream = stream
        self.name = dlq or to_name(companion_key(stream, "dlq"))
        self._sleep = sleep
        self._now = now

    async def count(self) -> int:
        return await self._broker.xlen(self.name)

    async def list(
        self, selection: Selection = EVERYTHING, *, limit: int = 100, max_examined: int | None = None
    ) -> list[DeadLetter]:
        """Dead letters, newest first. ``max_examined``: how many are examined; all by default."""
        letters: list[DeadLetter] = []
        async for letter in self._newest(selection, max_examined):
            letters.append(letter)
            if len(letters) == limit:
                break
        return letters

    async def show(self, id: EntryId | str) -> DeadLetter:
        """Raises NoSuchDeadLetter."""
        entry_id = id if isinstance(id, EntryId) else EntryId.parse(id)
        entries = await self._broker.xrange(self.name, entry_id, entry_id)
        if not entries:
            raise NoSuchDeadLetter(self.name, entry_id)
        return _read(entries[0])

    async def by_error(
        self, selection: Selection = EVERYTHING, *, max_examined: int | None = None
    ) -> Sequence[FailureGroup]:
        """Counts of similar failures: same type, and same text except for numbers and ids. The most frequent first.
        ``max_examined``: how many of the newest dead letters are examined; all by default."""
        groups: dict[tuple[str, str], FailureGroup] = {}
        async for letter in self._newest(selection, max_examined):
            key = (letter.error_type, signature(letter.error))
            if key not in groups:
                groups[key] = FailureGroup(*key, first=letter.id, example=letter.error)
            groups[key].add(letter.id, letter.group)
        return sorted(groups.values(), key=lambda each: (-each.count, each.error_type, each.error))

    async def replay(
        self,
        selection: Selection = EVERYTHING,
        *,
        to: str | None = None,
        rate: float | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        every_group: bool = False,
        for_group: str | None = None,
    ) -> Replayed:
        """Appends the selected messages to their original stream (or ``to``), oldest first, at most ``rate`` a second.

        In the original stream only the group that dead-lettered a message handles it again, unless ``every_group``; in
        another stream every group does. ``for_group`` names the group instead, for example after it was renamed. A dead
        letter is kept if there is no such group (``without_handler``). Messages that fail again during the replay are
        not replayed again. Each message is appended, and then its dead letter is removed. After a crash between the
        two, repeat the call within a day: it adds nothing twice.
        """
        if every_group and for_group is not None:
            raise InvalidArgument("for_group", for_group, "None together with every_group")
        if rate is not None and rate <= 0:
            raise InvalidArgument("rate", rate, "a number of letters per second, greater than 0")
        if to is not None:
            check_topic(to)
        done = Replayed(dry_run=dry_run)
        pace = None if rate is None else RateLimit(1 / rate, 1)
        async for batch in self._batches(selection, 1 if pace is not None else PAGE, limit):
            by_target: dict[tuple[str, str | None], MutableSequence[DeadLetter]] = {}
            for letter in batch:
                origin = letter.details.stream if letter.details is not None else ""
                if target := to or origin:
                    failed = letter.details.group if letter.details is not None and target == origin else None
                    chosen = None if every_group else for_group or failed or None
                    by_target.setdefault((target, chosen), []).append(letter)
                else:
                    done.left += 1
            for (target, chosen), letters in by_target.items():
                groups = await self._groups(target)
                if not groups or (chosen is not None and chosen not in groups):
                    lacking = (target, chosen or "")
                    done.without_handler[lacking] = done.without_handler.get(lacking, 0) + len(letters)
                    continue
                done.streams[target] = done.streams.get(target, 0) + len(letters)
                if dry_run:
                    done.added += len(letters)
                    continue
                if pace is not None and (wait := pace.reserve(self._now())) > 0:
                    await self._sleep(wait)
                await self._send(target, chosen, letters, done)
        return done

    async def purge(self, selection: Selection = EVERYTHING, *, limit: int | None = None, dry_run: bool = False) -> int:
        """Deletes the selected dead letters; returns how many."""
        gone = 0
        async for batch in self._batches(selection, PAGE, limit):
            gone += len(batch) if dry_run else await self._broker.xdel(self.name, [letter.id for letter in batch])
        return gone

    async def _groups(self, stream: str) -> set[str]:
        try:
            return {group.name for group in await self._broker.group_info(stream)}
        except NoSuchStream:
            return set()

    async def _send(self, target: str, group: str | None, letters: Sequence[DeadLetter], done: Replayed) -> None:
        for exceeds_limits, batch in groupby(letters, self._exceeds_limits):
            if exceeds_limits:
                for letter in batch:
                    await self._send_large(target, group, letter, done)
            else:
                await self._send_batch(target, group, list(batch), done)

    def _exceeds_limits(self, letter: DeadLetter) -> bool:
        """Whether ``append_unique`` would refuse the entry, and every other entry of its call."""
        fields = letter.fields
        size = sum(len(name) + len(value) for name, value in fields.items())
        return (
            2 * (len(fields) + MARKS) > MAX_ARGS_PER_ROW
            or size + MAX_MARKS_BYTES > self._broker.context.limits.max_entry_bytes
        )

    async def _send_large(self, target: str, group: str | None, letter: DeadLetter, done: Replayed) -> None:
        """Replays an entry that another program added, with more fields or bytes than a script can pass. If this is
        interrupted before the letter is removed, the entry is replayed twice."""
        began_s = time.monotonic()
        await self._broker.run(_append_without_limits, target, _renewed(letter, group))
        await self._broker.xdel(self.name, [letter.id])
        done.added += 1
        if tracing.active is not None:
            tracing.active.replayed(target, [letter.fields], began_s)

    async def _send_batch(self, target: str, group: str | None, letters: Sequence[DeadLetter], done: Replayed) -> None:
        entries = [(f"replay {self.name} {letter.id}", _renewed(letter, group)) for letter in letters]
        began_s = time.monotonic()
        appended = await self._broker.append_unique(target, entries)
        # Remove only after the append is certain: the other way round, a crash in between would lose the message.
        await self._broker.xdel(self.name, [letter.id for letter in letters])
        added = sum(id is not None for id in appended.ids)
        done.added += added
        done.already += len(letters) - added
        if tracing.active is not None:
            tracing.active.replayed(target, [letter.fields for letter in letters], began_s)

    async def _batches(self, selection: Selection, size: int, limit: int | None) -> AsyncIterator[Sequence[DeadLetter]]:
        batch: MutableSequence[DeadLetter] = []
        async for letter in self._all(selection):
            if limit is not None and limit <= 0:
                break
            batch.append(letter)
            limit = None if limit is None else limit - 1
            if len(batch) >= size:
                yield batch
                batch = []
        if batch:
            yield batch

    async def _newest(self, selection: Selection, max_examined: int | None) -> AsyncIterator[DeadLetter]:
        """Newest first, of the ``max_examined`` newest dead letters."""
        end: str | EntryId = "+"
        remaining = max_examined
        while remaining is None or remaining > 0:
            count = PAGE if remaining is None else min(PAGE, remaining)
            page = await self._broker.xrevrange(self.name, end, "-", count=count)
            for entry in page:
                letter = _read(entry)
                if selection.matches(letter):
                    yield letter
            if len(page) < count:
                return
            end = f"({page[-1].id}"
            remaining = None if remaining is None else remaining - count

    async def _all(self, selection: Selection) -> AsyncIterator[DeadLetter]:
        """Oldest first, up to the one that was last when the call began: later dead letters are left for the next
        call."""
        newest = await self._broker.xrevrange(self.name, selection.before or MAX_ID, "-", count=1)
        start = f"({selection.after}" if selection.after is not None else "-"
        while newest and (page := await self._broker.xrange(self.name, start, newest[0].id, count=PAGE)):
            for entry in page:
                letter = _read(entry)
                if selection.matches(letter):
                    yield letter
            start = f"({page[-1].id}"


async def dead_letter_streams(broker: Broker, pattern: str = "*.dlq") -> list[str]:
    """The dead-letter streams that are companion keys of streams."""
    return sorted(await broker.list_streams(pattern))


def _append_without_limits(context: Context, stream: str, fields: Mapping[bytes, bytes]) -> Operation[None]:
    key = to_bytes(stream)
    yield Command((b"XADD", key, b"*", *add_fields([], fields, sys.maxsize)), key)


def _read(entry: Entry) -> DeadLetter:
    return DeadLetter(entry.id, original(entry.fields), read_details(entry.fields))


def _renewed(letter: DeadLetter, group: str | None) -> dict[bytes, bytes]:
    return marked(letter.fields, letter.details.original_id if letter.details is not None else None, group)
