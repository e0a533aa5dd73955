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
    writer = rows.writeStream.format("redis_streams").option("url", asked["url"]).options(**asked["sink"])
    writer = writer.option("checkpointLocation", asked["checkpoint"])
    query = (writer.trigger(availableNow=True) if asked.get("available_now") else writer).start()
    print("started", flush=True)
    query.awaitTermination()
    print("finished", flush=True)


def flaky(asked: dict[str, Any]) -> None:
    """A batch write whose tasks fail at random places of their first attempts, after some rows were written."""
    spark = session(asked)
    seed = asked["seed"]

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        chance = random.Random(f"{seed}-{task.partitionId()}-{task.attemptNumber()}")
        for batch in batches:
            yield batch
            if task.attemptNumber() < 2 and chance.random() < 0.5:
                raise RuntimeError("planted")

    _write(_numbers(spark, asked).mapInArrow(fail, "value STRING"), asked)


def speculative(asked: dict[str, Any]) -> None:
    """A batch write in which one attempt hangs in the middle until a rival has written all of its rows."""
    spark = session(asked)

    def hang(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        for at, batch in enumerate(batches):
            if at == 2 and task.partitionId() == 0 and task.attemptNumber() == 0:
                time.sleep(5)
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
            java = [child for child in psutil.Process().children() if "java" in child.name()]
            daemons = [d for one in java for d in one.children() if "pyspark.worker" in " ".join(d.cmdline())]
            found = [worker for daemon in daemons for worker in daemon.children()]
            if found:
                victim = chance.choice(found)
                os.kill(victim.pid, signal.SIGKILL)
                kills.append(victim.pid)

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.03)
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
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "200")
    return spark.range(0, asked["rows"], 1, 4).selectExpr("cast(id AS STRING) AS value")


def _write(rows: DataFrame, asked: dict[str, Any]) -> None:
    rows.write.format("redis_streams").mode("append").option("url", asked["url"]).options(**asked["sink"]).save()
    print("finished", flush=True)


if __name__ == "__main__":
    {"copy": copy, "flaky": flaky, "speculative": speculative, "worker_killed": worker_killed}[sys.argv[1]](
        json.loads(sys.argv[2])
    )
