"""Detects entries that were removed before they were read, from the stream's counts, and counts each loss once.

Ids do not show a loss. The driver detects losses when it plans a batch, the tasks when they read it. A task cannot
report to the driver, so it records the gap in a companion hash of a stream, which the driver reads when the batch is
finished.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from uuid import uuid4

from millstream.broker import BlockingBroker, companion_key
from millstream.broker.failures import typed_error
from millstream.errors import InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import EntryId, StreamInfo
from millstream.spark.offsets import StreamPosition
from millstream.wire import Batch, ErrorReply, to_bytes, to_name

_OR_FAILOVER = (
    "or a failover removed entries that no replica had. With durability=replicated(n) a reader does not read those."
)


class Gap(NamedTuple):
    """Entries that are missing in a stream.

    ``lost`` is None if their number is unknown; ``certain`` is false if deletions have the same effect on the counts.
    """

    lost: int | None
    certain: bool
    explanation: str
    recreated: bool = False


def gap_after(
    stream: str, start: StreamPosition, info: StreamInfo | None, *, current_digest: tuple[str | None] | None = None
) -> Gap | None:
    """The gap after ``start``, if there is one, according to the stream's stats (None: it does not exist).

    ``current_digest``: the digest of the entry that now has the id ``start.id``; None if it was not read."""
    if info is None:
        if start.id == (0, 0):
            return None
        return Gap(None, False, f"stream {stream!r} was read up to {start.id} and is gone: entries were possibly lost.")
    if _is_recreated(start, info):
        text = (
            f"stream {stream!r} was read up to {start.id}, but now ends at {info.last_generated}: it was deleted and "
            f"recreated, and entries of the old stream were possibly lost; {_OR_FAILOVER}"
        )
        return Gap(None, False, text, recreated=True)
    if current_digest is not None and _is_replaced(start, info, current_digest[0]):
        text = (
            f"stream {stream!r} was read up to {start.id}, and now has another entry there: it was deleted and "
            f"recreated with the same ids, and entries of the old stream were possibly lost; {_OR_FAILOVER}"
        )
        return Gap(None, False, text, recreated=True)
    if not _is_trimmed_past(start.id, info):
        return None
    if start.added is None:
        if info.max_deleted <= start.id and info.entries_added == info.length:
            return None  # nothing was ever removed
        text = f"entries of stream {stream!r} after {start.id} were possibly trimmed before they were read."
        return Gap(None, False, text)
    lost = info.entries_added - info.length - start.added
    if lost < 0:
        # All entries that were read are gone, but this stream removed fewer entries than that: it was recreated.
        text = (
            f"stream {stream!r} was read up to {start.id}, but fewer entries were removed than read: it was deleted "
            "and recreated, and entries of the old stream were possibly lost."
        )
        return Gap(None, False, text, recreated=True)
    if lost == 0:
        return None
    certain = start.exact and info.max_deleted <= start.id
    how = "were trimmed" if certain else "were possibly trimmed (some may have been deleted one by one)"
    return Gap(lost, certain, f"{lost} entries of stream {stream!r} after {start.id} {how} before they were read.")


def _is_recreated(start: StreamPosition, info: StreamInfo) -> bool:
    if start.added is None:
        return False  # a start that the user configured may be in the future
    if info.last_generated < start.id:
        return True
    return start.exact and info.entries_added < start.added


def _is_replaced(start: StreamPosition, info: StreamInfo, current_digest: str | None) -> bool:
    """Whether the last read entry is now another one, or is missing although it was neither trimmed nor deleted."""
    if current_digest is not None:
        return current_digest != start.witness
    return info.first is not None and info.first.id <= start.id and info.max_deleted < start.id


def _is_trimmed_past(after: EntryId, info: StreamInfo) -> bool:
    """Whether trimming has passed ``after``: while an entry at or before it exists, no later entry was trimmed."""
    return info.first is None or info.first.id > after


GAP_RECORD_TTL_MS = 86_400_000
"""TTL of recorded gaps: the driver deletes them when the batch ends, unless it crashed."""
_UNKNOWN = b"?"

log = logging.getLogger("millstream.spark")


class Loss(NamedTuple):
    """The number of lost ``entries`` that is known, and the number of ``gaps``; the size of some gaps is unknown."""

    entries: int = 0
    gaps: int = 0


class LossAccount:
    """The losses of a query since it was started, by stream. Used on the driver."""

    def __init__(self) -> None:
        self.totals: dict[str, Loss] = {}
        self._reported: dict[str, str] = {}
        self._planned: dict[str, int | None] = {}

    def start_planning(self) -> None:
        """Planning of the next batch starts: gaps that are detected from now on belong to it."""
        self._planned = {}

    def add_driver_gap(self, stream: str, gap: Gap) -> bool:
        """Counts a gap before the next batch; True if it is new. An idle query detects the same gap at each poll."""
        self._planned[stream] = gap.lost
        if self._reported.get(stream) == gap.explanation:
            return False
        self._reported[stream] = gap.explanation
        self._add(stream, gap.lost or 0, gaps=1)
        return True

    def add_task_gaps(self, recorded: Mapping[str, int | None]) -> dict[str, int | None]:
        """Counts the gaps that tasks of the finished batch recorded; returns the losses that are new.

        A task also detects the gap that the driver detected when it planned the batch, possibly with more entries lost.
        """
        new_losses: dict[str, int | None] = {}
        for stream, lost in recorded.items():
            if stream not in self._planned:
                self._add(stream, lost or 0, gaps=1)
                new_losses[stream] = lost
                continue
            counted = self._planned[stream]
            if counted is not None and lost is not None and lost > counted:
                self._add(stream, lost - counted, gaps=0)
                new_losses[stream] = lost - counted
        return new_losses

    def _add(self, stream: str, entries: int, *, gaps: int) -> None:
        before = self.totals.get(stream, Loss())
        self.totals[stream] = Loss(before.entries + entries, before.gaps + gaps)


def new_gap_key(streams: Iterable[str]) -> bytes | None:
    """The key where a batch's tasks record gaps; None if no stream of the batch can have companion keys."""
    for stream in streams:
        try:
            return companion_key(stream, f"gaps:{uuid4().hex}")
        except InvalidArgument:
            continue  # a name with '}' and no hash tag
    return None


def record_gap(broker: BlockingBroker, gap_key: bytes, stream: str, lost: int | None) -> None:
    """Called in a task. A repeated task writes the same field: a number replaces it, an unknown number does not."""
    field = to_bytes(stream)
    record = (b"HSETNX", gap_key, field, _UNKNOWN) if lost is None else (b"HSET", gap_key, field, b"%d" % lost)
    expiry = (b"PEXPIRE", gap_key, b"%d" % GAP_RECORD_TTL_MS)
    try:
        for reply in broker.transport.call_many(Batch([record, expiry], gap_key, atomic=True, repeatable=True)):
            if isinstance(reply, ErrorReply):
                raise typed_error(reply)
    except MillstreamError as error:
        # A reader without write permission continues: the gap is in the log.
        log.warning("the gap in stream %r is missing in the query's progress: %s", stream, error)


def recorded_gaps(broker: BlockingBroker, gap_key: bytes) -> dict[str, int | None]:
    """Called on the driver when the batch is finished.

    It does not delete the gaps: if the reply is lost, the command is repeated, and the gaps must still be there.
    """
    try:
        fields = broker.hgetall(gap_key)
    except PermissionDenied:
        return {}  # the tasks have no permission either, and have logged it
    return {to_name(stream): None if lost == _UNKNOWN else int(lost) for stream, lost in fields.items()}


def delete_gap_record(broker: BlockingBroker, gap_key: bytes) -> None:
    """Called on the driver after the gaps were counted. If deleting fails, the key expires."""
    try:
        broker.delete(gap_key)
    except MillstreamError as error:
        log.info("recorded gaps in %r could not be deleted; they expire after a day: %s", to_name(gap_key), error)
