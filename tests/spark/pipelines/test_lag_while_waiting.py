"""A pipeline whose required sink refuses is shown as falling behind, and as catching up; Spark reports nothing
meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import pipeline, redis_sink

from millstream.observe.metrics import Exposition
from millstream.observe.pipelines import PipelineMetrics
from millstream.pipelines.runner import Runner
from millstream.testing import RedisProcess, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@contextmanager
def full(server: RedisProcess) -> Iterator[None]:
    """A server that replies, and stores nothing."""
    client = redis.Redis(port=server.port)
    client.config_set("maxmemory", 1)
    yield
    client.config_set("maxmemory", 0)


@contextmanager
def frozen(server: RedisProcess) -> Iterator[None]:
    """A server that accepts connections, and never replies."""
    server.signal(signal.SIGSTOP)
    yield
    server.signal(signal.SIGCONT)


@pytest.mark.parametrize("refuses", [full, pytest.param(frozen, marks=pytest.mark.at_length)], ids=["full", "frozen"])
def test_lag_goes_on_while_a_required_sink_is_retried(
    refuses: Callable[[RedisProcess], AbstractContextManager[None]],
    spark: SparkSession,
    redis_server: RedisProcess,
    tmp_path: Path,
) -> None:
    client, added, exposition = redis.Redis(port=redis_server.port), 0, Exposition()

    def add(count: int) -> None:
        nonlocal added
        for _ in range(count):
            added += 1
            client.xadd("in", {"event": json.dumps({"n": added})})

    def gauge(name: str) -> float | None:
        return exposition.registry.get_sample_value(f"millstream_{name}", {"pipeline": "orders"})

    source = {"type": "redis", "config": {"uri": redis_server.url, "stream": "in"}}
    with RedisProcess() as sink:
        made = pipeline(tmp_path, source=source, sinks=[redis_sink(sink.url)], batch={"max_events": 10})
        runner = Runner([made], session=spark, observer=PipelineMetrics(exposition.registry))

        def shows(lag: int) -> Callable[[], bool]:
            return lambda: runner.statuses()[0].progress.get("lag") == gauge("source_lag_entries") == lag

        try:
            with refuses(sink):
                # The first batch of all, before Spark has ever reported on one.
                add(30)
                runner.start()
                wait_until(shows(30), what="a lag of all there is", timeout_s=90)
                add(5)
                wait_until(shows(35), what="a lag that grows", timeout_s=90)
                assert gauge("source_lag_seconds") is None, "the sink has no event yet"
            theirs = redis.Redis(port=sink.port)
            wait_until(lambda: theirs.xlen("out") == 35, what="everything", timeout_s=120)
            wait_until(lambda: runner.statuses()[0].progress.get("lag") == 0, what="no lag", timeout_s=90)
            with refuses(sink):
                add(7)
                wait_until(shows(7), what="a lag of the batch at hand", timeout_s=90)
                add(40)
                wait_until(shows(47), what="a lag that grows", timeout_s=90)
                wait_until(lambda: runner.statuses()[0].sinks == {"main": "retrying"}, what="retries", timeout_s=90)
                seconds = gauge("source_lag_seconds")
                assert seconds is not None
                wait_until(lambda: (gauge("source_lag_seconds") or 0) > seconds, what="an age that grows", timeout_s=90)
            wait_until(lambda: theirs.xlen("out") == added, what="everything", timeout_s=120)
            wait_until(lambda: runner.statuses()[0].progress.get("lag") == 0, what="no lag", timeout_s=90)
        finally:
            runner.close()
