"""The places that a task's rows go to: what each is given, it delivers and counts. Several are fed at once, each by a
thread, so that a slow one does not add its time to the others'. A hard cap on a stream may take entries that a group
has not read, and counts them.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.broker import BlockingBroker, beside, mapping, typed
from millstream.errors import DurabilityUnavailable, InvalidArgument, NoSuchStream, PermissionDenied
from millstream.model import Backoff, TrimPolicy
from millstream.spark.connection import broker_at
from millstream.spark.delivery import (
    AtLeastOnce,
    ExactlyOnce,
    ExactlyOnceAt,
    ExactlyOnceByEventId,
    RowWriter,
    WriteIdentity,
)
from millstream.spark.entries import Piece, RowMapping, is_text, mapping_for, pieces, refuse_oversize
from millstream.spark.errors import InvalidOption, RowsMiscounted
from millstream.spark.sink_options import Delivered, SinkOptions, sink_options, total
from millstream.wire import Args, Batch, ErrorReply, to_bytes

_UNCONFIRMED: Final = Backoff(initial_ms=25, max_ms=1000)

log = logging.getLogger("millstream.spark")


@dataclass(slots=True)
class Counts:
    """``dropped``: entries that the hard cap took before a group had read them."""

    rows: int = 0
    added: int = 0
    skipped: int = 0
    dropped: int = 0


class WriteTarget:
    """In a task, for one thread at a time. ``identity`` is None where the delivery needs none."""

    def __init__(self, options: SinkOptions, mapping: RowMapping, identity: WriteIdentity | None) -> None:
        self.options = options
        self.counts = Counts()
        self._mapping = mapping
        self._broker = broker_at(options.address, script_entries=options.chunk_rows)
        self._delivery = _delivery(self._broker, options, identity)

    def take(self, batch: pa.RecordBatch) -> None:
        counts = self.counts
        counts.rows += batch.num_rows
        for piece in pieces(self._mapping, batch):
            refuse_oversize(piece, self._broker.context.limits.max_entry_bytes)
            added, skipped = self._write(piece)
            counts.added += added
            counts.skipped += skipped
            if self.options.trim is not None:
                counts.dropped += cap(self._broker, piece.stream, self.options.trim)

    def _write(self, piece: Piece) -> tuple[int, int]:
        """Replicas that are away for a moment, as in a failover, must not end the query: Spark repeats no task of its
        own on ``local[n]``. So rows that are stored but not confirmed are given again, until ``deadlineMs``."""
        until = time.monotonic() + self.options.address.deadline_ms / 1000
        for attempt in itertools.count(1):
            try:
                return self._delivery.write(piece)
            except DurabilityUnavailable as error:
                if not (error.stored and self._delivery.known_again) or time.monotonic() >= until:
                    raise
                if attempt == 1:
                    log.warning("stream %r: %s The rows are given again until they are confirmed.", piece.stream, error)
                time.sleep(_UNCONFIRMED.delay_ms(attempt, random.random()) / 1000)  # noqa: S311  no secret, only pauses
        raise AssertionError("it returns or raises")

    def finish(self) -> Counts:
        """All rows were given. As many must be confirmed, or the task fails."""
        self._delivery.finish()
        if self.counts.added + self.counts.skipped != self.counts.rows:
            raise RowsMiscounted(self.counts.rows, self.counts.added + self.counts.skipped)
        return self.counts


def write_here(
    options: Mapping[str, str], schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, partition: str
) -> Delivered:
    """What a task does, in this process: for rows that wait elsewhere than in Spark, such as a spool's.

    ``options`` are those of a batch write that names its application and version.
    """
    made = sink_options(options, streaming=False)
    if made.txn_app_id is None or made.txn_version is None:
        raise InvalidOption("txnAppId", made.txn_app_id, "txnAppId and txnVersion, so that a repeated write is known")
    mapping = mapping_for(schema, made)
    identity = WriteIdentity(made.txn_app_id, made.txn_version, made.sink_id, partition)
    target = WriteTarget(made, mapping, identity)
    seen: list[Delivered] = []
    for batch in Meter(schema, mapping, None).over(batches, seen):
        target.take(batch)
    return total(seen)._replace(dropped=target.finish().dropped)


class Meter:
    """Measures batches as they pass. Pickles: made on the driver, used in the tasks."""

    def __init__(self, schema: pa.Schema, mapping: RowMapping, time_column: str | None) -> None:
        """Raises InvalidOption where ``timeColumn`` is no column of whole numbers."""
        self._time = time_column
        if self._time is not None:
            if self._time not in schema.names:
                raise InvalidOption("timeColumn", self._time, "the name of a column of this query")
            if not pa.types.is_integer(schema.field(self._time).type):
                kind = schema.field(self._time).type
                raise InvalidOption("timeColumn", f"{self._time} {kind}", "a column of whole numbers, such as BIGINT")
        value = mapping.value_column()
        self._text = value if value is not None and is_text(schema.field(value).type) else None

    def over(self, batches: Iterable[pa.RecordBatch], seen: list[Delivered]) -> Iterator[pa.RecordBatch]:
        """The batches; what each of them was goes into ``seen``."""
        for batch in batches:
            seen.append(self._measured(batch))
            yield batch

    def _measured(self, batch: pa.RecordBatch) -> Delivered:
        size = 0 if self._text is None else pc.sum(pc.binary_length(batch.column(self._text))).as_py() or 0
        if self._time is None:
            return Delivered(batch.num_rows, size)
        ends = pc.min_max(batch.column(self._time)).as_py()
        return Delivered(batch.num_rows, size, ends["min"], ends["max"])


def _delivery(broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity | None) -> RowWriter:
    if options.delivery == "at_least_once":
        return AtLeastOnce(broker, options)
    if options.delivery == "exactly_once_by_event_id":
        return ExactlyOnceByEventId(broker, options)
    assert identity is not None
    kind = ExactlyOnce if options.id_column is None else ExactlyOnceAt
    return kind(broker, options, identity)


_AHEAD: Final = 2
"""Batches that may wait for a target: it bounds memory, and keeps a quick target from waiting for the rows."""


def fan_out(batches: Iterable[pa.RecordBatch], targets: Sequence[WriteTarget]) -> None:
    """Returns when every target has every batch; raises the error of the first that failed, in their order."""
    if len(targets) == 1:
        for batch in batches:
            targets[0].take(batch)
        return
    hands = [_Feeder(target) for target in targets]
    try:
        for batch in batches:
            for hand in hands:
                hand.give(batch)
    finally:
        for hand in hands:
            hand.give(None)
        for hand in hands:
            hand.join()
    for hand in hands:
        if hand.error is not None:
            hand.error.add_note(f"while writing to sink {hand.target.options.sink_id!r}")
            raise hand.error


class _Feeder(threading.Thread):
    def __init__(self, target: WriteTarget) -> None:
        super().__init__(name=f"millstream-{target.options.sink_id}", daemon=True)
        self.target = target
        self.error: BaseException | None = None
        self._waiting: queue.Queue[pa.RecordBatch | None] = queue.Queue(_AHEAD)
        self.start()

    def give(self, batch: pa.RecordBatch | None) -> None:
        """None is the end."""
        self._waiting.put(batch)

    def run(self) -> None:
        while (batch := self._waiting.get()) is not None:
            if self.error is None:
                try:
                    self.target.take(batch)
                except BaseException as error:  # raised again in the task's own thread
                    self.error = error


def cap(broker: BlockingBroker, stream: str, policy: TrimPolicy) -> int:
    """Trims, and answers how many entries the slowest group lost unread. One atomic step; safe to repeat."""
    key = to_bytes(stream)
    look = (b"XINFO", b"STREAM", key)
    try:
        replies = _together(broker, key, [look, (b"XINFO", b"GROUPS", key), (b"XTRIM", key, *policy.words()), look])
    except NoSuchStream:
        return 0
    before, groups, _, after = replies
    lost = undelivered(mapping(before), [mapping(group) for group in groups], mapping(after))
    if not lost:
        return 0
    _enter(broker, stream, lost)
    return max(lost.values())


def undelivered(before: dict[bytes, Any], groups: list[dict[bytes, Any]], after: dict[bytes, Any]) -> dict[bytes, int]:
    """Group to the number of entries that left the stream between the two looks before it had read them."""
    removed_before = before[b"entries-added"] - before[b"length"]
    removed_after = after[b"entries-added"] - after[b"length"]
    reads = {group[b"name"]: _read(group, before[b"entries-added"]) for group in groups}
    lost = {name: removed_after - max(removed_before, read) for name, read in reads.items() if read is not None}
    return {name: count for name, count in lost.items() if count > 0}


def _read(group: dict[bytes, Any], added: int) -> int | None:
    """A group that was made without ENTRIESREAD does not count what it reads, but the server may know its lag."""
    if group[b"entries-read"] is not None:
        return int(group[b"entries-read"])
    return None if group[b"lag"] is None else added - int(group[b"lag"])


def _enter(broker: BlockingBroker, stream: str, lost: Mapping[bytes, int]) -> None:
    """After the trim, in a step of its own: a task that dies in between has trimmed and not counted."""
    try:
        book = beside(stream, "dropped")
        # Sent again when its answer is lost: rather a loss that is counted twice than one that is not.
        _together(broker, book, [(b"HINCRBY", book, group, b"%d" % count) for group, count in lost.items()])
    except InvalidArgument:
        pass  # a name that can have no companions: the driver's log still tells
    except PermissionDenied as error:
        log.warning("what the hard cap took from stream %r is only in this log: %s", stream, error)


def _together(broker: BlockingBroker, key: bytes, commands: list[Args]) -> list[Any]:
    replies = broker.link.call_many(Batch(commands, key, atomic=True, repeatable=True))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed(reply)
    return list(replies)
