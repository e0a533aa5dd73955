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

from millstream.broker import gc_paused
from millstream.spark.delivery import WriteIdentity, streaming_identity
from millstream.spark.entries import mapping_for
from millstream.spark.errors import TaskUnheard
from millstream.spark.fan_out import Meter, WriteTarget, fan_out
from millstream.spark.sink_options import Delivered, SinkOptions, total, write_report

log = logging.getLogger("millstream.spark")


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task did, over all targets. ``dropped``: what the hard cap took before a group had read it."""

    partition: int
    rows: int
    added: int
    skipped: int
    dropped: int
    measured: Delivered | None = None
    """The rows themselves, whatever the number of targets; None where nobody asked."""


class _Writing:
    """What both writers do in a task."""

    def __init__(self, targets: Sequence[SinkOptions], schema: pa.Schema) -> None:
        self._targets = [(options, mapping_for(schema, options)) for options in targets]
        options, mapping = self._targets[0]
        self._report = options.report
        self._meter = None if options.report is None else Meter(schema, mapping, options.time_column)

    def _identity(self, task: TaskContext, options: SinkOptions) -> WriteIdentity:
        raise AssertionError("each writer has its own")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task. The number of rows confirmed is the number of rows given, or the task fails."""
        task = TaskContext.get()
        assert task is not None
        targets = [
            WriteTarget(options, mapping, self._identity(task, options) if options.delivery == "exactly_once" else None)
            for options, mapping in self._targets
        ]
        seen: list[Delivered] = []
        with gc_paused():
            fan_out(iterator if self._meter is None else self._meter.over(iterator, seen), targets)
        done = [target.finish() for target in targets]
        return Written(
            task.partitionId(),
            rows=sum(one.rows for one in done),
            added=sum(one.added for one in done),
            skipped=sum(one.skipped for one in done),
            dropped=sum(one.dropped for one in done),
            measured=None if self._meter is None else total(seen)._replace(dropped=sum(one.dropped for one in done)),
        )


class RedisStreamsBatchWriter(_Writing, DataSourceArrowWriter):
    """``fallback_app`` is made once on the driver, so that all tasks and all their retries are one application."""

    def __init__(self, targets: Sequence[SinkOptions], schema: pa.Schema, fallback_app: str) -> None:
        super().__init__(targets, schema)
        self._fallback_app = fallback_app

    def _identity(self, task: TaskContext, options: SinkOptions) -> WriteIdentity:
        app, version = options.txn_app_id, options.txn_version
        if app is None or version is None:
            app, version = self._fallback_app, 0
        return WriteIdentity(app, version, options.sink_id, task.partitionId())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        done = told_to_driver(messages, "batch write")
        if self._report is not None:
            write_report(self._report, [one.measured for one in done if one.measured is not None])

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _report_abort(messages, "batch write")


class RedisStreamsWriter(_Writing, DataSourceStreamArrowWriter):
    def _identity(self, task: TaskContext, options: SinkOptions) -> WriteIdentity:
        return streaming_identity(
            task.getLocalProperty("sql.streaming.queryId"),
            task.getLocalProperty("streaming.sql.batchId"),
            options.sink_id,
            task.partitionId(),
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        told_to_driver(messages, f"batch {batchId}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _report_abort(messages, f"batch {batchId}")


def told_to_driver(messages: Sequence[WriterCommitMessage | None], what: str) -> list[Written]:
    """What the tasks' commit messages say that a user should know, into the driver's log.

    Raises TaskUnheard where one of the tasks has sent none: nobody knows then what it has written.
    """
    done = [message for message in messages if isinstance(message, Written)]
    if len(done) != len(messages):
        raise TaskUnheard(what, len(messages) - len(done))
    if skipped := sum(message.skipped for message in done):
        log.info("%s: %d rows were there already and were not added again", what, skipped)
    if dropped := sum(message.dropped for message in done):
        log.warning("%s: the hard cap (maxlen, minid) took %d entries before a group had read them", what, dropped)
    return done


def _report_abort(messages: Sequence[WriterCommitMessage | None], what: str) -> None:
    done = [message for message in messages if isinstance(message, Written)]
    rows = sum(message.added for message in done)
    log.warning("%s failed; %d rows of it are in the stream, and a replay will not add them again", what, rows)
