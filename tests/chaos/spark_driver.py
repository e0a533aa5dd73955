"""Spark drivers for the chaos tests, as processes of their own that can be killed: one function for each command.

Usage: python spark_driver.py COMMAND '{"url": ..., ...}'
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from millstream import open_blocking_broker
from millstream.spark.source import RedisStreamsSource
from millstream.spark.writer import RedisStreamsWriter
from millstream.testing import wait_until

GROUP = "DRIVER_GROUP"
"""Names the driver's process group to the processes that Spark starts, which have groups of their own."""


def session(asked: dict[str, Any]) -> SparkSession:
    builder = SparkSession.builder.master(asked.get("master", "local[2,4]")).appName("millstream-chaos")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        **asked.get("spark", {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def copy(asked: dict[str, Any]) -> None:
    """Copies a stream to another; runs until it is killed, or ends by itself with ``available_now``."""
    spark = session(asked)
    rows = spark.readStream.format("redis_streams").option("url", asked["url"]).options(**asked["source"]).load()
    writer = rows.writeStream.format(asked.get("format", "redis_streams"))
    writer = writer.option("url", asked["url"]).options(**asked["sink"])
    writer = writer.option("checkpointLocation", asked["checkpoint"])
    query = (writer.trigger(availableNow=True) if asked.get("available_now") else writer).start()
    print("started", flush=True)
    query.awaitTermination()
    print("finished", flush=True)


class DyingSink(RedisStreamsSource):
    """The sink, but the driver dies after a batch's tasks have written all rows and before Spark commits the batch."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: StructType, overwrite: bool) -> RedisStreamsWriter:
        made = super().streamWriter(schema, overwrite)

        def die(messages: Any, batchId: int) -> None:
            if batchId == 1:
                os.killpg(int(os.environ[GROUP]), signal.SIGKILL)

        made.commit = die  # type: ignore[method-assign]  # one method of one instance is all that is planted
        return made


def dying(asked: dict[str, Any]) -> None:
    """``copy`` that is killed between the sink's write and Spark's commit of batch 1."""
    os.environ[GROUP] = str(os.getpgrp())
    session(asked).dataSource.register(DyingSink)
    copy({**asked, "format": "dying"})


def wait_for(url: str, stream: str, event: bytes) -> None:
    """Returns when the stream holds the event."""
    after = "-"

    def seen() -> bool:
        nonlocal after
        page = broker.xrange(stream, after, "+", count=500)
        if page:
            after = f"({page[-1].id}"
        return any(entry.fields[b"event"] == event for entry in page)

    with open_blocking_broker(url) as broker:
        wait_until(seen, what="a row to be written", timeout_s=60)


def flaky(asked: dict[str, Any]) -> None:
    """A batch write whose tasks fail at random places of their first attempts, after some rows were written."""
    spark = session(asked)
    seed, url, stream = asked["seed"], asked["url"], asked["sink"]["stream"]

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        chance = random.Random(f"{seed}-{task.partitionId()}-{task.attemptNumber()}")
        last = chance.randrange(8, 20)
        for at, batch in enumerate(batches):
            if at == 0:
                first = batch.column(0)[0].as_py().encode()
            yield batch
            if task.attemptNumber() < 2 and at == last:
                # Rows are buffered on their way to the sink: a task that failed at this point might have written none.
                wait_for(url, stream, first)
                raise RuntimeError("planted")

    _write(_numbers(spark, asked).mapInArrow(fail, "value STRING"), asked)


def rivals(asked: dict[str, Any]) -> None:
    """Two attempts of one write at the same time: one waits in the middle until the other has written all rows.

    Spark's own speculation starts no second attempt on the host of the first, so none in local mode; on a cluster of
    two names of this machine it does: tests/spark/test_places.py.
    """
    spark = session(asked)
    url, stream, hangs = asked["url"], asked["sink"]["stream"], asked["hangs"]
    last = f"{asked['rows'] // 4 - 1:01000d}".encode()

    def hang(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        for at, batch in enumerate(batches):
            if at == 12 and task.partitionId() == 0 and hangs:
                wait_for(url, stream, last)
            yield batch

    _write(_numbers(spark, asked).mapInArrow(hang, "value STRING"), asked)


def worker_killed(asked: dict[str, Any]) -> None:
    """A batch write while Python workers of its tasks are killed, one after the other."""
    spark = session(asked)
    chance = random.Random(asked["seed"])
    done = threading.Event()
    kills = []

    def kill() -> None:
        import psutil

        while not done.wait(chance.uniform(0.3, 0.8)) and len(kills) < 3:
            result: list[psutil.Process] = []
            for process in psutil.Process().children(recursive=True):
                try:
                    if "pyspark.worker" in " ".join(process.cmdline()):
                        result += process.children()
                except psutil.Error:
                    continue  # it has ended, but its parent has not waited for it yet: only the others count
            if result:
                victim = chance.choice(result)
                os.kill(victim.pid, signal.SIGKILL)
                kills.append(victim.pid)

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.1)
            yield batch

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        _write(_numbers(spark, asked).mapInArrow(slow, "value STRING"), asked)
    finally:
        done.set()
        thread.join()
    print(f"killed {len(kills)}", flush=True)


def _numbers(spark: SparkSession, asked: dict[str, Any]) -> DataFrame:
    """Wide rows in small batches: rows that fit into the buffers would reach the sink only at the end."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "200")
    return spark.range(0, asked["rows"], 1, 4).selectExpr("lpad(cast(id AS STRING), 1000, '0') AS value")


def _write(rows: DataFrame, asked: dict[str, Any]) -> None:
    rows.write.format("redis_streams").mode("append").option("url", asked["url"]).options(**asked["sink"]).save()
    print("finished", flush=True)


if __name__ == "__main__":
    commands = {each.__name__: each for each in (copy, dying, flaky, rivals, worker_killed)}
    commands[sys.argv[1]](json.loads(sys.argv[2]))
