"""One place that a task's rows go to: what it is given, it delivers and counts."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from millstream.broker.broker import BlockingBroker
from millstream.spark.caps import cap
from millstream.spark.connection import broker_at
from millstream.spark.delivery import AtLeastOnce, Delivery, ExactlyOnce, ExactlyOnceAt, ExactlyOnceByEventId
from millstream.spark.entries import Mapping, pieces
from millstream.spark.errors import RowsMiscounted
from millstream.spark.identity import WriteIdentity
from millstream.spark.options import SinkOptions


@dataclass(slots=True)
class Counts:
    """``dropped``: entries that the hard cap took before a group had read them."""

    rows: int = 0
    added: int = 0
    skipped: int = 0
    dropped: int = 0


class Target:
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


def _delivery(broker: BlockingBroker, options: SinkOptions, identity: WriteIdentity | None) -> Delivery:
    if options.delivery == "at_least_once":
        return AtLeastOnce(broker, options)
    if options.delivery == "exactly_once_by_event_id":
        return ExactlyOnceByEventId(broker, options)
    assert identity is not None
    kind = ExactlyOnce if options.id_column is None else ExactlyOnceAt
    return kind(broker, options, identity)
