"""The writers that Spark runs: created on the driver, they write in the tasks.

Driver: the constructor, ``commit`` and ``abort``. Tasks: ``write``, in other processes, possibly several times for one
partition: in parallel (speculation) or one after the other (retries). Only the first attempt adds a row.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from millstream.broker.bulk import gc_paused
from millstream.spark.connection import broker_at
from millstream.spark.delivery import WriteIdentity, streaming_identity
from millstream.spark.entries import mapping_for
from millstream.spark.errors import MissingCommitMessage
from millstream.spark.fan_out import Meter, WriteTarget, fan_out
from millstream.spark.sink_options import Delivered, SinkOptions, total, write_report
from millstream.spark.task_record import RowsGiven, WrittenPosition, record_tasks

log = logging.getLogger("millstream.spark")


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """The commit message of one task, over all targets. ``dropped``: unread entries that the hard cap removed."""

    partition: int
    rows: int
    added: int
    skipped: int
    dropped: int
    measured: Delivered | None = None
    """The rows themselves, whatever the number of targets; None without the option ``report``."""
    rows_by_target: tuple[tuple[RowsGiven, ...], ...] = ()
    """For each target, the rows that are recognised by their position."""


class _TaskWriter(ABC):
    """Writes rows in a task; the base of both writers."""

    def __init__(self, targets: Sequence[SinkOptions], schema: pa.Schema) -> None:
        self._targets = [(options, mapping_for(schema, options)) for options in targets]
        options, mapping = self._targets[0]
        self._report = options.report
        self._meter = None if options.report is None else Meter(schema, mapping, options.time_column)

    @abstractmethod
    def _identity(self, partition: int, options: SinkOptions) -> WriteIdentity: ...

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Called in a task."""
        with gc_paused():
            return self.write_partition(iterator, _task().partitionId())

    def write_partition(self, batches: Iterable[pa.RecordBatch], partition: int) -> Written:
        """Fails if the number of confirmed rows is not the number of rows received."""
        targets = [
            WriteTarget(
                options, mapping, self._identity(partition, options) if options.delivery == "exactly_once" else None
            )
            for options, mapping in self._targets
        ]
        measured: list[Delivered] = []
        fan_out(batches if self._meter is None else self._meter.over(batches, measured), targets)
        counts = [target.finish() for target in targets]
        sums = {
            name: sum(getattr(target_counts, name) for target_counts in counts)
            for name in ("added", "skipped", "dropped")
        }
        places = None
        if len(targets) > 1:
            places = {
                target.options.sink_id: {name: getattr(target.counts, name) for name in sums} for target in targets
            }
        return Written(
            partition,
            rows=sum(target_counts.rows for target_counts in counts),
            **sums,
            measured=None if self._meter is None else total(measured)._replace(**sums, places=places),
            rows_by_target=tuple(tuple(target.rows_given) for target in targets),
        )

    def _record_tasks(self, results: Sequence[Written]) -> None:
        """Called on the driver. Raises NonDeterministicReplay if an earlier attempt was split into other tasks."""
        for at, (options, _) in enumerate(self._targets):
            rows_by_position: dict[WrittenPosition, dict[int, int]] = {}
            for written in results:
                for position, rows in written.rows_by_target[at]:
                    rows_by_position.setdefault(position, {})[written.partition] = rows
            if rows_by_position:
                broker = broker_at(options.address, script_entries=options.chunk_rows)
                record_tasks(broker, rows_by_position, len(results), options.forget_after_ms)


class RedisStreamsBatchWriter(_TaskWriter, DataSourceArrowWriter):
    """``fallback_app`` is created once on the driver, so that all tasks and their retries are one application."""

    def __init__(self, targets: Sequence[SinkOptions], schema: pa.Schema, fallback_app: str) -> None:
        super().__init__(targets, schema)
        self._fallback_app = fallback_app

    def _identity(self, partition: int, options: SinkOptions) -> WriteIdentity:
        app, version = options.txn_app_id, options.txn_version
        if app is None or version is None:
            return WriteIdentity(self._fallback_app, 0, options.sink_id, partition, replayable=False)
        return WriteIdentity(app, version, options.sink_id, partition)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        results = commit_results(messages, "batch write")
        self._record_tasks(results)
        if self._report is not None:
            write_report(self._report, [result.measured for result in results if result.measured is not None])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _report_abort(messages, "batch write")


class RedisStreamsWriter(_TaskWriter, DataSourceStreamArrowWriter):
    def _identity(self, partition: int, options: SinkOptions) -> WriteIdentity:
        task = _task()
        return streaming_identity(
            task.getLocalProperty("sql.streaming.queryId"),
            task.getLocalProperty("streaming.sql.batchId"),
            options.sink_id,
            partition,
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._record_tasks(commit_results(messages, f"batch {batchId}"))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _report_abort(messages, f"batch {batchId}")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "called in a task"
    return task


def commit_results(messages: Sequence[WriterCommitMessage | None], write: str) -> list[Written]:
    """The commit messages of all tasks; logs skipped rows and dropped entries.

    Raises MissingCommitMessage if a task sent none, because it is unknown then what the task wrote.
    """
    results = [message for message in messages if isinstance(message, Written)]
    if len(results) != len(messages):
        raise MissingCommitMessage(write, len(messages) - len(results))
    if skipped := sum(result.skipped for result in results):
        log.info("%s: %d rows were already stored and were not added again", write, skipped)
    if dropped := sum(result.dropped for result in results):
        log.warning("%s: the hard cap (maxlen, minid) removed %d entries before a group read them", write, dropped)
    return results


def _report_abort(messages: Sequence[WriterCommitMessage | None], write: str) -> None:
    results = [message for message in messages if isinstance(message, Written)]
    rows = sum(result.added for result in results)
    log.warning("%s failed; %d of its rows are stored, and a replay will not add them again", write, rows)
