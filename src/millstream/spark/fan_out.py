"""The places that a task's rows go to: what each is given, it delivers and counts. Several are fed at once, each by a
thread, so that a slow one does not add its time to the others'."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from millstream.broker.blocking_broker import BlockingBroker
from millstream.spark.caps import cap
from millstream.spark.connection import broker_at
from millstream.spark.delivery import (
    AtLeastOnce,
    ExactlyOnce,
    ExactlyOnceAt,
    ExactlyOnceByEventId,
    RowWriter,
    WriteIdentity,
)
from millstream.spark.entries import Mapping, pieces
from millstream.spark.errors import RowsMiscounted
from millstream.spark.options import SinkOptions


@dataclass(slots=True)
class Counts:
    """``dropped``: entries that the hard cap took before a group had read them."""

    rows: int = 0
    added: int = 0
    skipped: int = 0
    dropped: int = 0


class WriteTarget:
    """In a task, for one thread at a time. ``identity`` is None where the delivery needs none."""

    def __init__(self, options: SinkOptions, mapping: Mapping, identity: WriteIdentity | None) -> None:
        self.options = options
        self.counts = Counts()
        self._mapping = mapping
        self._broker = broker_at(options.address, script_entries=options.chunk_rows)
        self._delivery = _delivery(self._broker, options, identity)

    def take(self, batch: pa.RecordBatch) -> None:
        counts = self.counts
        counts.rows += batch.num_rows
        for piece in pieces(self._mapping, batch):
            added, skipped = self._delivery.write(piece)
            counts.added += added
            counts.skipped += skipped
            if self.options.trim is not None:
                counts.dropped += cap(self._broker, piece.stream, self.options.trim)

    def finish(self) -> Counts:
        """All rows were given. As many must be confirmed, or the task fails."""
        self._delivery.finish()
        if self.counts.added + self.counts.skipped != self.counts.rows:
            raise RowsMiscounted(self.counts.rows, self.counts.added + self.counts.skipped)
        return self.counts


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
