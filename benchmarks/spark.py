"""Spark against plain Python with redis-py: reading, copying exactly once, latency, and a worker's memory; and 10,000
streams against one.

local[2] after a warm-up, with a separate redis-server on the same machine. MILLSTREAM_BENCH_ENTRIES makes the stream
shorter.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import Progress, Result, interleaved, rate
from millstream import BlockingBroker, open_blocking_broker
from millstream.testing import RedisProcess, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRIES = int(os.environ.get("MILLSTREAM_BENCH_ENTRIES", "5000000"))
VALUE = b'{"order_id": 12345678, "customer": "c-0042", "amount": 12.50, "currency": "EUR", "n":1}'[:85]
STREAMS = 10_000
LATENCY_ROWS = 60
LATENCY_EVERY_S = 0.25


def run(rounds: int, progress: Progress) -> list[Result]:
    with RedisProcess() as server, open_blocking_broker(server.url) as broker:
        spark = _session()
        try:
            return _Bench(spark, server.url, broker, progress).run(rounds)
        finally:
            spark.stop()


def _session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .appName("millstream-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


class _Bench:
    def __init__(self, spark: SparkSession, url: str, broker: BlockingBroker, progress: Progress) -> None:
        self._spark = spark
        self._url = url
        self._broker = broker
        self._progress = progress

    def run(self, rounds: int) -> list[Result]:
        tenth = ENTRIES // 10
        self._fill("small", tenth)
        self._read("small")  # warms JVM and workers
        small, big = self._peak("small"), 0
        self._progress(f"{ENTRIES:,} entries of one {len(VALUE)}-byte field")
        self._fill("big", ENTRIES)
        big = self._peak("big")
        self._progress(f"reading {ENTRIES:,} entries, {rounds} rounds")
        reads = interleaved(
            rounds,
            lambda: rate(ENTRIES, lambda: self._read("big")),
            lambda: rate(ENTRIES, lambda: self._peer_read("big")),
        )
        self._progress(f"copying {ENTRIES:,} entries, {rounds} rounds")
        self._copy("small")
        copies = interleaved(rounds, lambda: self._timed_copy(self._copy), lambda: self._timed_copy(self._peer_copy))
        self._broker.delete("big", "small", "copy")
        streams = self._many_streams(rounds)
        self._progress(f"latency of {LATENCY_ROWS} rows, one every {LATENCY_EVERY_S} s")
        latency = self._latency()
        return [
            Result("spark_read", reads[0], "entries/s", "redis-py xrange loop", reads[1], ">= 1.5 x"),
            Result("spark_copy", copies[0], "entries/s", "redis-py xrange + xadd", copies[1], ">= 3 x"),
            Result(
                "spark_streams_10000", streams[0], "entries/s", "one stream of the same entries", streams[1], ">= 0.3 x"
            ),
            Result("spark_latency_p50_ms", latency, "ms", goal="<= 150"),
            Result("spark_memory", big / small, "x (of the peak for a tenth of the data)", goal="<= 1.2"),
        ]

    def _fill(self, stream: str, count: int) -> None:
        rows = [{b"event": VALUE}] * 10_000
        for first in range(0, count, len(rows)):
            self._broker.xadd_many(stream, rows[: count - first])

    def _many_streams(self, rounds: int) -> tuple[float, ...]:
        """Rows per second from STREAMS small streams, and from one stream with as many rows."""
        each = max(1, ENTRIES // 5 // STREAMS)
        count = each * STREAMS
        self._progress(f"reading {count:,} entries of {STREAMS:,} streams and of one, {rounds} rounds")
        for at in range(STREAMS):
            self._broker.xadd_many(f"many-{at}", [{b"event": VALUE}] * each)
        self._fill("one", count)
        many = self._spark.read.format("redis_streams").options(url=self._url, subscribePattern="many-.*").load
        figures = interleaved(
            rounds,
            lambda: rate(count, lambda: many().write.format("noop").mode("overwrite").save()),
            lambda: rate(count, lambda: self._read("one")),
        )
        assert many().count() == count
        self._broker.delete("one", *(f"many-{at}" for at in range(STREAMS)))
        return figures

    # --- ours ---

    def _source(self, stream: str) -> DataFrame:
        return self._spark.read.format("redis_streams").options(url=self._url, subscribe=stream).load()

    def _read(self, stream: str) -> None:
        self._source(stream).write.format("noop").mode("overwrite").save()

    def _copy(self, stream: str) -> None:
        rows = self._source(stream).select("value")
        rows.write.format("redis_streams").mode("append").options(url=self._url, stream="copy").save()

    def _timed_copy(self, work: Any) -> float:
        self._broker.delete("copy")
        figure = rate(ENTRIES, lambda: work("big"))
        assert self._broker.xlen("copy") == ENTRIES
        return figure

    def _peak(self, stream: str) -> int:
        """The most memory that any Python worker takes while the stream is read, in bytes."""
        import psutil  # type: ignore[import-untyped]  # of the bench group; it has no types

        peak, done = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                for process in psutil.Process().children(recursive=True):
                    try:
                        if "python" in process.name():
                            peak = max(peak, process.memory_info().rss)
                    except psutil.Error:
                        continue  # the process has just ended

        watcher = threading.Thread(target=watch)
        watcher.start()
        self._read(stream)
        done.set()
        watcher.join()
        return peak

    def _latency(self) -> float:
        """From XADD into the source to XADD into the sink, by the server's own clock in the ids: the median, in ms."""
        with tempfile.TemporaryDirectory() as where:
            source = self._spark.readStream.format("redis_streams").options(
                url=self._url, subscribe="from", startingOffsets="earliest"
            )
            writer = source.load().select("value").writeStream.format("redis_streams")
            query = writer.options(url=self._url, stream="to", checkpointLocation=where).start()
            try:
                for n in range(LATENCY_ROWS):
                    self._broker.xadd("from", {"event": str(n)})
                    if n < LATENCY_ROWS // 3:  # warming up: one after the other
                        wait_until(partial(self._arrived, n + 1), what="the row", timeout_s=60)
                    time.sleep(LATENCY_EVERY_S)
                wait_until(partial(self._arrived, LATENCY_ROWS), what="all rows", timeout_s=60)
            finally:
                query.stop()
        sent = [entry.id.ms for entry in self._broker.xrange("from")]
        arrived = {int(entry.text("event")): entry.id.ms for entry in self._broker.xrange("to")}
        return statistics.median(arrived[n] - sent[n] for n in range(LATENCY_ROWS // 3, LATENCY_ROWS))

    def _arrived(self, rows: int) -> bool:
        return self._broker.xlen("to") >= rows

    # --- the peer ---

    def _client(self) -> Any:
        import redis

        return redis.Redis.from_url(self._url)

    def _peer_read(self, stream: str) -> None:
        client, start = self._client(), "-"
        while page := client.xrange(stream, start, "+", count=10_000):
            start = "(" + page[-1][0].decode()

    def _peer_copy(self, stream: str) -> None:
        client, start = self._client(), "-"
        while page := client.xrange(stream, start, "+", count=10_000):
            pipeline = client.pipeline(transaction=False)
            for _, fields in page:
                pipeline.xadd("copy", fields)
            pipeline.execute()
            start = "(" + page[-1][0].decode()
