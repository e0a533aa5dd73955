"""Entries that left a stream before they were read: found by counts, since ids cannot tell, and each counted once.

The driver finds them when it plans, the tasks when they read. A task cannot answer the driver: one that meets a gap
notes it in a hash beside a stream, and the driver looks there when the batch is finished.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from uuid import uuid4

from millstream.broker import BlockingBroker, beside, typed
from millstream.errors import InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import EntryId, StreamInfo
from millstream.spark.offsets import StreamPosition
from millstream.wire import Batch, ErrorReply, to_bytes, to_name

_OR_TAKEN_BACK = (
    "or a failover took back what no replica had, and a reader with durability=replicated(n) would not have read."
)


class Gap(NamedTuple):
    """``lost`` is None where nobody can know how many; ``certain`` is false where deletions look the same."""

    lost: int | None
    certain: bool
    explanation: str
    recreated: bool = False


def gap_after(
    stream: str, start: StreamPosition, info: StreamInfo | None, *, seen: tuple[str | None] | None = None
) -> Gap | None:
    """What is missing of the entries after ``start``, given what the stream says now (None: it does not exist), and
    what was ``seen`` in the place of the entry that was read last (None: nobody has looked)."""
    if info is None:
        if start.id == (0, 0):
            return None
        return Gap(None, False, f"stream {stream!r} was read up to {start.id} and is gone: entries were possibly lost.")
    if _made_anew(start, info):
        text = (
            f"stream {stream!r} was read up to {start.id}, but now ends at {info.last_generated}: it was deleted and "
            f"made anew, and entries of the old one were possibly lost; {_OR_TAKEN_BACK}"
        )
        return Gap(None, False, text, recreated=True)
    if seen is not None and _replaced(start, info, seen[0]):
        text = (
            f"stream {stream!r} was read up to {start.id}, and now holds another entry there: it was deleted and made "
            f"anew with the same ids, and entries of the old one were possibly lost; {_OR_TAKEN_BACK}"
        )
        return Gap(None, False, text, recreated=True)
    if not _overtaken(start.id, info):
        return None
    if start.added is None:
        if info.max_deleted <= start.id and info.entries_added == info.length:
            return None  # nothing was ever removed
        text = f"entries of stream {stream!r} after {start.id} were possibly trimmed before they were read."
        return Gap(None, False, text)
    lost = info.entries_added - info.length - start.added
    if lost < 0:
        # All that was read is gone, but fewer entries have ever left this stream: it is not the one that was read.
        text = (
            f"stream {stream!r} was read up to {start.id}, but fewer entries have left it than were read: it was "
            "deleted and made anew, and entries of the old one were possibly lost."
        )
        return Gap(None, False, text, recreated=True)
    if lost == 0:
        return None
    certain = start.exact and info.max_deleted <= start.id
    how = "were trimmed" if certain else "were possibly trimmed (some may have been deleted one by one)"
    return Gap(lost, certain, f"{lost} entries of stream {stream!r} after {start.id} {how} before they were read.")


def _made_anew(start: StreamPosition, info: StreamInfo) -> bool:
    if start.added is None:
        return False  # a start that a user chose may lie in the future
    if info.last_generated < start.id:
        return True
    return start.exact and info.entries_added < start.added


def _replaced(start: StreamPosition, info: StreamInfo, seen: str | None) -> bool:
    """Whether another entry stands where the last one was read, or none though nobody has trimmed or deleted it."""
    if seen is not None:
        return seen != start.witness
    return info.first is not None and info.first.id <= start.id and info.max_deleted < start.id


def _overtaken(after: EntryId, info: StreamInfo) -> bool:
    """True when trimming has passed ``after``: while an entry at or before it is left, none behind it was trimmed."""
    return info.first is None or info.first.id > after


KEPT_MS = 86_400_000
"""How long a note outlives its writing: the driver takes it when the batch ends, a dead driver never does."""
_UNKNOWN = b"?"

log = logging.getLogger("millstream.spark")


class Loss(NamedTuple):
    """``entries`` that are known to be lost, in so many ``gaps``: of some of them nobody knows the size."""

    entries: int = 0
    gaps: int = 0


class LossAccount:
    """What a query has lost since it was started, by stream. On the driver."""

    def __init__(self) -> None:
        self.totals: dict[str, Loss] = {}
        self._told: dict[str, str] = {}
        self._planned: dict[str, int | None] = {}

    def planning(self) -> None:
        """The next batch is looked for: what is found from here on belongs to it."""
        self._planned = {}

    def by_driver(self, stream: str, gap: Gap) -> bool:
        """A gap before the next batch; True where it is a new one. An idle query meets the same one again and again."""
        self._planned[stream] = gap.lost
        if self._told.get(stream) == gap.explanation:
            return False
        self._told[stream] = gap.explanation
        self._add(stream, gap.lost or 0, gaps=1)
        return True

    def by_tasks(self, noted: Mapping[str, int | None]) -> dict[str, int | None]:
        """What the finished batch's tasks met; returns what of it is new.

        A task meets again what the driver met when it planned the batch, perhaps with more gone meanwhile.
        """
        fresh: dict[str, int | None] = {}
        for stream, lost in noted.items():
            if stream not in self._planned:
                self._add(stream, lost or 0, gaps=1)
                fresh[stream] = lost
                continue
            known = self._planned[stream]
            if known is not None and lost is not None and lost > known:
                self._add(stream, lost - known, gaps=0)
                fresh[stream] = lost - known
        return fresh

    def _add(self, stream: str, entries: int, *, gaps: int) -> None:
        before = self.totals.get(stream, Loss())
        self.totals[stream] = Loss(before.entries + entries, before.gaps + gaps)


def new_book(streams: Iterable[str]) -> bytes | None:
    """The key that a batch's tasks write to; None where no stream of the batch can have companions."""
    for stream in streams:
        try:
            return beside(stream, f"gaps:{uuid4().hex}")
        except InvalidArgument:
            continue  # a name with '}' and no hash tag
    return None


def note(broker: BlockingBroker, book: bytes, stream: str, lost: int | None) -> None:
    """In a task. A repeated task writes the same field: a number replaces what was there, an unknown one does not."""
    field = to_bytes(stream)
    line = (b"HSETNX", book, field, _UNKNOWN) if lost is None else (b"HSET", book, field, b"%d" % lost)
    ending = (b"PEXPIRE", book, b"%d" % KEPT_MS)
    try:
        for reply in broker.link.call_many(Batch([line, ending], book, atomic=True, repeatable=True)):
            if isinstance(reply, ErrorReply):
                raise typed(reply)
    except MillstreamError as error:
        # A reader that may not write reads on: the gap is in the log.
        log.warning("the gap in stream %r is not in the query's progress: %s", stream, error)


def noted(broker: BlockingBroker, book: bytes) -> dict[str, int | None]:
    """On the driver, once the batch is finished. Reads alone: an answer may be lost and the question asked again, and
    what had been taken away with the first one would be missing from the query's progress."""
    try:
        found = broker.hgetall(book)
    except PermissionDenied:
        return {}  # its tasks could not note anything either, and have said so
    return {to_name(stream): None if lost == _UNKNOWN else int(lost) for stream, lost in found.items()}


def forget(broker: BlockingBroker, book: bytes) -> None:
    """On the driver, after what was noted is counted. Notes that cannot be taken away end by themselves."""
    try:
        broker.delete(book)
    except MillstreamError as error:
        log.info("notes of gaps stay in %r for a day at most: %s", to_name(book), error)
