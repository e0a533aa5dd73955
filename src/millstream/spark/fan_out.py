"""Writes a task's rows to one or more targets and counts them. Several targets are written in parallel by threads.

A hard cap on a stream may remove entries that a consumer group has not read; those are counted.
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

from millstream.broker import BlockingBroker, companion_key
from millstream.broker.failures import typed_error
from millstream.broker.operations.conversion import mapping
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
from millstream.spark.entries import Piece, RowMapping, check_sizes, is_text, mapping_for, pieces
from millstream.spark.errors import InvalidOption, RowsMiscounted
from millstream.spark.sink_options import Delivered, SinkOptions, sink_options, total
from millstream.spark.task_record import RowsGiven
from millstream.wire import Args, Batch, ErrorReply, to_bytes

_UNCONFIRMED: Final = Backoff(initial_ms=25, max_ms=1000)

log = logging.getLogger("millstream.spark")


@dataclass(slots=True)
class Counts:
    """``dropped``: entries that the hard cap removed before a group read them."""

    rows: int = 0
    added: int = 0
    skipped: int = 0
    dropped: int = 0


class WriteTarget:
    """One target of a task, used by one thread at a time. ``identity`` is None if the delivery does not need it."""

    def __init__(self, options: SinkOptions, mapping: RowMapping, identity: WriteIdentity | None) -> None:
        self.options = options
        self.counts = Counts()
        self.rows_given: list[RowsGiven] = []
        self._mapping = mapping
        self._broker = broker_at(options.address, script_entries=options.chunk_rows)
        writing = self._broker if options.fence is None else self._broker.fenced(options.fence)
        self._delivery = _delivery(writing, options, identity)

    def take(self, batch: pa.RecordBatch) -> None:
        counts = self.counts
        counts.rows += batch.num_rows
        for piece in pieces(self._mapping, batch):
            check_sizes(piece, self._broker.context.limits.max_entry_bytes)
            added, skipped = self._write(piece)
            counts.added += added
            counts.skipped += skipped
            if self.options.trim is not None:
                counts.dropped += cap(self._broker, piece.stream, self.options.trim)

    def _write(self, piece: Piece) -> tuple[int, int]:
        """Writes rows, and again until ``deadlineMs`` if they are stored but replicas have not confirmed them.

        A short outage of replicas, as in a failover, must not fail the query: on ``local[n]`` Spark does not retry
        tasks."""
        until = time.monotonic() + self.options.address.deadline_ms / 1000
        for attempt in itertools.count(1):
            try:
                return self._delivery.write(piece)
            except DurabilityUnavailable as error:
                if not (error.stored and self._delivery.is_idempotent) or time.monotonic() >= until:
                    raise
                if attempt == 1:
                    log.warning(
                        "stream %r: %s The rows are written again until they are confirmed.", piece.stream, error
                    )
                time.sleep(_UNCONFIRMED.delay_ms(attempt, random.random()) / 1000)  # noqa: S311  jitter, not a secret
        raise AssertionError("the loop returns or raises")

    def finish(self) -> Counts:
        """Called after the last row. Raises RowsMiscounted if not all rows were confirmed."""
        self.rows_given = self._delivery.finish()
        if self.counts.added + self.counts.skipped != self.counts.rows:
            raise RowsMiscounted(self.counts.rows, self.counts.added + self.counts.skipped)
        return self.counts


def write_here(
    options: Mapping[str, str], schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, partition: str
) -> Delivered:
    """Writes rows as a task does, but in this process: for rows outside Spark, such as those of a sink queue.

    ``options`` are those of a batch write with ``txnAppId`` and ``txnVersion``.
    """
    parsed = sink_options(options, streaming=False)
    if parsed.txn_app_id is None or parsed.txn_version is None:
        allowed = "txnAppId and txnVersion, so that a repeated write is recognised"
        raise InvalidOption("txnAppId", parsed.txn_app_id, allowed)
    mapping = mapping_for(schema, parsed)
    identity = WriteIdentity(parsed.txn_app_id, parsed.txn_version, parsed.sink_id, partition)
    target = WriteTarget(parsed, mapping, identity)
    measured: list[Delivered] = []
    for batch in Meter(schema, mapping, None).over(batches, measured):
        target.take(batch)
    counts = target.finish()
    return total(measured)._replace(added=counts.added, skipped=counts.skipped, dropped=counts.dropped)


class Meter:
    """Measures batches before they are written. Created on the driver and pickled to the tasks."""

    def __init__(self, schema: pa.Schema, mapping: RowMapping, time_column: str | None) -> None:
        """Raises InvalidOption if ``timeColumn`` is not a column of whole numbers."""
        self._time = time_column
        if self._time is not None:
            if self._time not in schema.names:
                raise InvalidOption("timeColumn", self._time, "the name of a column of this query")
            if not pa.types.is_integer(schema.field(self._time).type):
                kind = schema.field(self._time).type
                raise InvalidOption("timeColumn", f"{self._time} {kind}", "a column of whole numbers, such as BIGINT")
        value = mapping.value_column()
        self._text = value if value is not None and is_text(schema.field(value).type) else None

    def over(self, batches: Iterable[pa.RecordBatch], measured: list[Delivered]) -> Iterator[pa.RecordBatch]:
        """Yields the batches, and appends the numbers of each to ``measured``."""
        for batch in batches:
            measured.append(self._measure(batch))
            yield batch

    def _measure(self, batch: pa.RecordBatch) -> Delivered:
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


_MAX_QUEUED_BATCHES: Final = 2
"""Batches that are queued for each target: bounds memory, and lets a fast target run ahead of a slow one."""


def fan_out(batches: Iterable[pa.RecordBatch], targets: Sequence[WriteTarget]) -> None:
    """Writes every batch to every target. Raises the error of the first target, in their order, that failed."""
    if len(targets) == 1:
        for batch in batches:
            targets[0].take(batch)
        return
    feeders = [_Feeder(target) for target in targets]
    try:
        for batch in batches:
            for feeder in feeders:
                feeder.put(batch)
    finally:
        for feeder in feeders:
            feeder.put(None)
        for feeder in feeders:
            feeder.join()
    for feeder in feeders:
        if feeder.error is not None:
            feeder.error.add_note(f"while writing to sink {feeder.target.options.sink_id!r}")
            raise feeder.error


class _Feeder(threading.Thread):
    def __init__(self, target: WriteTarget) -> None:
        super().__init__(name=f"millstream-{target.options.sink_id}", daemon=True)
        self.target = target
        self.error: BaseException | None = None
        self._batches: queue.Queue[pa.RecordBatch | None] = queue.Queue(_MAX_QUEUED_BATCHES)
        self.start()

    def put(self, batch: pa.RecordBatch | None) -> None:
        """Queues a batch; None ends the thread."""
        self._batches.put(batch)

    def run(self) -> None:
        while (batch := self._batches.get()) is not None:
            if self.error is None:
                try:
                    self.target.take(batch)
                except BaseException as error:  # fan_out raises it in the task's thread
                    self.error = error


def cap(broker: BlockingBroker, stream: str, policy: TrimPolicy) -> int:
    """Trims the stream in one transaction. Returns how many unread entries the slowest group lost. Safe to repeat."""
    key = to_bytes(stream)
    info = (b"XINFO", b"STREAM", key)
    try:
        commands = [info, (b"XINFO", b"GROUPS", key), (b"XTRIM", key, *policy.args()), info]
        replies = _run_atomically(broker, key, commands)
    except NoSuchStream:
        return 0
    before, groups, _, after = replies
    lost = undelivered(mapping(before), [mapping(group) for group in groups], mapping(after))
    if not lost:
        return 0
    _record_dropped(broker, stream, lost)
    return max(lost.values())


def undelivered(before: dict[bytes, Any], groups: list[dict[bytes, Any]], after: dict[bytes, Any]) -> dict[bytes, int]:
    """For each group the number of entries that were removed between the two stats before the group read them."""
    removed_before = before[b"entries-added"] - before[b"length"]
    removed_after = after[b"entries-added"] - after[b"length"]
    reads = {group[b"name"]: _read(group, before[b"entries-added"]) for group in groups}
    lost = {name: removed_after - max(removed_before, read) for name, read in reads.items() if read is not None}
    return {name: count for name, count in lost.items() if count > 0}


def _read(group: dict[bytes, Any], added: int) -> int | None:
    """Entries that the group has read. Without ENTRIESREAD it has no count, but the server may know its lag."""
    if group[b"entries-read"] is not None:
        return int(group[b"entries-read"])
    return None if group[b"lag"] is None else added - int(group[b"lag"])


def _record_dropped(broker: BlockingBroker, stream: str, lost: Mapping[bytes, int]) -> None:
    """Called after the trim, not atomically with it: a task that crashes in between has trimmed and not counted."""
    try:
        dropped_key = companion_key(stream, "dropped")
        # If the reply is lost, the command is repeated: a loss may be counted twice, but is never missed.
        _run_atomically(
            broker, dropped_key, [(b"HINCRBY", dropped_key, group, b"%d" % count) for group, count in lost.items()]
        )
    except InvalidArgument:
        pass  # this name cannot have companion keys; the driver's log has the loss
    except PermissionDenied as error:
        log.warning("entries that the hard cap removed from stream %r are only reported in this log: %s", stream, error)


def _run_atomically(broker: BlockingBroker, key: bytes, commands: list[Args]) -> list[Any]:
    replies = broker.transport.call_many(Batch(commands, key, atomic=True, repeatable=True))
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed_error(reply)
    return list(replies)
