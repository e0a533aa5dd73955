"""The writers that Spark runs: checked on the driver, writing in the tasks.

Driver: the constructor, ``commit`` and ``abort``. Tasks: ``write``, in other processes, perhaps several times for one
partition: at once (speculation) or one after the other (retries). Whoever comes second adds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from millstream.broker.broker import BlockingBroker
from millstream.spark.caps import cap
from millstream.spark.connection import broker_at
from millstream.spark.delivery import AtLeastOnce, Delivery, ExactlyOnce, ExactlyOnceAt, ExactlyOnceByEventId
from millstream.spark.entries import mapping_for, pieces
from millstream.spark.errors import RowsMiscounted
from millstream.spark.identity import WriteIdentity, streaming_identity
from millstream.spark.options import SinkOptions
from millstream.spark.pages import collector_resting

log = logging.getLogger("millstream.spark")


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task did. ``dropped`` counts entries that the hard cap took before a group had read them."""

    partition: int
    rows: int
    added: int
    skipped: int
    dropped: int


class _Writing:
    """What both writers do in a task."""

    def __init__(self, options: SinkOptions, schema: pa.Schema) -> None:
        self._options = options
        self._mapping = mapping_for(schema, options)

    def _identity(self, task: TaskContext) -> WriteIdentity:
        raise AssertionError("each writer has its own")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task. The number of rows confirmed is the number of rows given, or the task fails."""
        task = TaskContext.get()
        assert task is not None
        broker = broker_at(self._options.address, script_entries=self._options.chunk_rows)
        delivery = self._delivery(broker, task)
        rows = added = skipped = dropped = 0
        with collector_resting():
            for batch in iterator:
                rows += batch.num_rows
                for piece in pieces(self._mapping, batch):
                    new, known = delivery.write(piece)
                    added += new
                    skipped += known
                    if self._options.trim is not None:
                        dropped += cap(broker, piece.stream, self._options.trim)
        delivery.finish()
        if added + skipped != rows:
            raise RowsMiscounted(rows, added + skipped)
        return Written(task.partitionId(), rows, added, skipped, dropped)

    def _delivery(self, broker: BlockingBroker, task: TaskContext) -> Delivery:
        if self._options.delivery == "at_least_once":
            return AtLeastOnce(broker, self._options)
        if self._options.delivery == "exactly_once_by_event_id":
            return ExactlyOnceByEventId(broker, self._options)
        kind = ExactlyOnce if self._options.id_column is None else ExactlyOnceAt
        return kind(broker, self._options, self._identity(task))


class RedisStreamsBatchWriter(_Writing, DataSourceArrowWriter):
    """``fallback_app`` is made once on the driver, so that all tasks and all their retries are one application."""

    def __init__(self, options: SinkOptions, schema: pa.Schema, fallback_app: str) -> None:
        super().__init__(options, schema)
        self._fallback_app = fallback_app

    def _identity(self, task: TaskContext) -> WriteIdentity:
        app, version = self._options.txn_app_id, self._options.txn_version
        if app is None or version is None:
            app, version = self._fallback_app, 0
        return WriteIdentity(app, version, self._options.sink_id, task.partitionId())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        told_to_driver(messages, "batch write")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _report_abort(messages, "batch write")


class RedisStreamsWriter(_Writing, DataSourceStreamArrowWriter):
    def _identity(self, task: TaskContext) -> WriteIdentity:
        return streaming_identity(
            task.getLocalProperty("sql.streaming.queryId"),
            task.getLocalProperty("streaming.sql.batchId"),
            self._options.sink_id,
            task.partitionId(),
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        told_to_driver(messages, f"batch {batchId}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _report_abort(messages, f"batch {batchId}")


def told_to_driver(messages: Sequence[WriterCommitMessage | None], what: str) -> None:
    """What the tasks' commit messages say that a user should know, into the driver's log."""
    done = [message for message in messages if isinstance(message, Written)]
    if skipped := sum(message.skipped for message in done):
        log.info("%s: %d rows were there already and were not added again", what, skipped)
    if dropped := sum(message.dropped for message in done):
        log.warning("%s: the hard cap (maxlen, minid) took %d entries before a group had read them", what, dropped)


def _report_abort(messages: Sequence[WriterCommitMessage | None], what: str) -> None:
    done = [message for message in messages if isinstance(message, Written)]
    rows = sum(message.added for message in done)
    log.warning("%s failed; %d rows of it are in the stream, and a replay will not add them again", what, rows)
