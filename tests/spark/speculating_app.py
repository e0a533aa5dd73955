"""Writes whose first partition has two attempts that Spark itself started, both of them writing to the end.

Usage: python speculating_app.py '{"url": ..., "master": ..., "spark": {...}, "checkpoint": ..., "writes": {...}}'

Which rows an attempt gives to the sink, and when, is decided in front of the sink, so that no buffer blurs it. Each
attempt notes in Redis what it did: the test reads there, not from what Spark says, that both of them wrote.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from millstream import open_blocking_broker
from millstream.broker.blocking_broker import BlockingBroker
from millstream.spark.source import RedisStreamsSource
from millstream.spark.writer import RedisStreamsBatchWriter, RedisStreamsWriter, Written
from millstream.testing import wait_until

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.speculation.efficiency.enabled": "false",
    # A second attempt shall be a speculative one: after a failure there is none.
    "spark.task.maxFailures": "1",
}


COMMITTED = "committed"
"""What the driver notes when Spark has accepted the write."""


class Attempt:
    """One attempt of a task: reports its progress to the other attempt, and waits for it."""

    def __init__(self, broker: BlockingBroker, stream: str, number: int | str) -> None:
        self._broker = broker
        self._notes = f"notes:{stream}"
        self._number = str(number)

    def note(self, what: str, **more: Any) -> None:
        fields = {"attempt": self._number, "what": what, **{name: str(value) for name, value in more.items()}}
        self._broker.xadd(self._notes, fields)

    def wait_for_other_attempt(self, what: str) -> None:
        def has_arrived() -> bool:
            notes = self._broker.xrange(self._notes)
            return any(note.text("what") == what and note.text("attempt") != self._number for note in notes)

        wait_until(has_arrived, what=f"the other attempt: {what}", timeout_s=60)


Write = Callable[[Any, Iterator[pa.RecordBatch]], Written]


def write_against_a_rival(
    write: Write, writer: Any, url: str, stream: str, half: int, batches: Iterator[pa.RecordBatch]
) -> Written:
    """In a task, in the place of the sink's ``write``.

    The first attempt hangs when half of its batches are stored, until its copy has caught up and stored one more. From
    there on both go side by side, batch by batch, and neither ends before the other has written everything. The copy
    ends first, so that which of the two Spark takes is no chance; the other is killed by Spark, or comes too late.
    """
    task = TaskContext.get()
    assert task is not None
    if task.partitionId() != 0:
        return write(writer, batches)
    with open_blocking_broker(url) as broker:
        attempt = Attempt(broker, stream, task.attemptNumber())

        def given() -> Iterator[pa.RecordBatch]:
            for at, batch in enumerate(batches):
                if at == 0 and task.attemptNumber():
                    attempt.wait_for_other_attempt(f"stored {half - 1}")  # on a slow machine the copy might come early
                if at == half and not task.attemptNumber():
                    attempt.wait_for_other_attempt(f"stored {half}")
                yield batch
                attempt.note(f"stored {at}")  # for the sink asks for the next one when it has stored this one
                if at > half:
                    attempt.wait_for_other_attempt(f"stored {at}")

        written = write(writer, given())
        facts = {"rows": written.rows, "added": written.added, "skipped": written.skipped}
        attempt.note("ended", task=task.taskAttemptId(), executor=os.getcwd(), **facts)
        attempt.wait_for_other_attempt("ended" if task.attemptNumber() else COMMITTED)
        return written


class RivalSink(RedisStreamsSource):
    """The sink, between whose batches the attempts of the first partition wait for each other."""

    half = 0

    @classmethod
    def name(cls) -> str:
        return "rival"

    def writer(self, schema: StructType, overwrite: bool) -> RedisStreamsBatchWriter:
        return self._planted(super().writer(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> RedisStreamsWriter:
        return self._planted(super().streamWriter(schema, overwrite))

    def _planted(self, made: Any) -> Any:
        where = (self.options["url"], self.options["stream"])
        made.write = partial(write_against_a_rival, type(made).write, made, *where, self.half)
        return made


def main() -> None:
    asked = json.loads(sys.argv[1])
    builder = SparkSession.builder.appName("millstream-speculating").master(asked["master"])
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", **SPECULATION, **asked["spark"]}
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    RivalSink.half = asked["half"]
    spark.dataSource.register(RivalSink)
    for name, write in asked["writes"].items():
        if write.pop("streaming", False):
            _copy(spark, asked, f"{asked['checkpoint']}/{name}", write)
        else:
            rows = _numbers(spark, asked["rows"])
            rows.write.format("rival").mode("append").options(url=asked["url"], content="value", **write).save()
        with open_blocking_broker(asked["url"]) as broker:
            Attempt(broker, write["stream"], "driver").note(COMMITTED)
    spark.stop()


def _numbers(spark: SparkSession, rows: int) -> DataFrame:
    part = f"cast(id >= {rows // 2} AS INT) AS part"
    return spark.range(0, rows, 1, 2).selectExpr("cast(id AS STRING) AS value", "concat(id + 1, '-0') AS key", part)


def _copy(spark: SparkSession, asked: dict[str, Any], checkpoint: str, sink: dict[str, str]) -> None:
    """A query over two partitions of one batch: with a limit, the source cuts it evenly."""
    source = spark.readStream.format("redis_streams").options(
        url=asked["url"], subscribe="in", startingOffsets="earliest", minPartitions="2"
    )
    rows = source.option("maxOffsetsPerTrigger", str(asked["rows"])).load()
    writer = rows.writeStream.format("rival").options(url=asked["url"], **sink)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    main()
