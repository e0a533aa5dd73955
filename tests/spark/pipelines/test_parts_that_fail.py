"""Failures of parts do not stop a pipeline: a full disk, a wrong password, an unreachable source."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, Facts, entries, numbers, pipeline, redis_sink, run_once, values

from millstream.errors import PayloadTooLarge
from millstream.pipelines import Runner
from millstream.pipelines.errors import SpecRefused
from millstream.testing import RedisProcess, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

DISK_BYTES = 3 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of three megabytes, where the machine lets us mount one."""
    location = tmp_path / "disk"
    location.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(location)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield location
    subprocess.run(["umount", "-l", str(location)], check=False)


def test_full_disk_drops_batches_of_the_optional_sink_only(
    spark: SparkSession, redis_server: RedisProcess, small_disk: Path
) -> None:
    """The checkpoint is on the same disk. The optional sink never replies; the required one gets every row."""
    optional = redis_sink("redis://127.0.0.1:1", "late", required=False, queue={"min_free": "256kb"})
    source = {"type": "generator", "config": {"rows": 120_000, "partitions": 2}}
    made = pipeline(
        small_disk,
        source=source,
        sinks=[redis_sink(redis_server.url, **PATIENT), optional],
        batch={"max_events": 30_000},
    )
    facts = run_once(spark, made)
    assert sorted(numbers(redis.Redis(port=redis_server.port))) == list(range(120_000))
    assert values(facts, "pipeline.queue_dropped", "batch"), "the disk was never full: the test shows nothing"


class Watched:
    """A runner in the tests' session, and the observer events that it emits."""

    def __init__(self, spark: SparkSession, *pipelines: Any, once: bool = False) -> None:
        self.facts: Facts = []
        self.runner = Runner(pipelines, once=once, session=spark, observer=self._hear)

    def _hear(self, name: str, /, **facts: Any) -> None:
        self.facts.append((name, facts))

    def __enter__(self) -> Watched:
        self.runner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def state(self, sink: str) -> str:
        self.runner.runs["orders"].check()
        return self.runner.runs["orders"].status().sinks[sink]


def test_an_optional_sink_with_a_wrong_password_stops_and_can_be_started_again(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    with RedisProcess(["--requirepass", "right"]) as guarded:
        other = redis.Redis(port=guarded.port, password="right")
        wrong = guarded.url.replace("://", "://:wrong@")
        sinks = [redis_sink(redis_server.url, **PATIENT), redis_sink(wrong, "late", required=False)]
        with Watched(spark, pipeline(tmp_path, sinks=sinks)) as watched:
            run = watched.runner.runs["orders"]
            wait_until(lambda: client.xlen("out") == 300, what="the required sink", timeout_s=120)
            wait_until(lambda: watched.state("late") == "failed", what="the optional one parked", timeout_s=60)
            tried = len(values(watched.facts, "pipeline.sink_error", "sink"))
            assert values(watched.facts, "pipeline.sink_failed", "sink") == ["late"], "emitted once"
            assert run.status().state == "running"
            assert run.status().waiting["late"] > 0
            assert len(values(watched.facts, "pipeline.sink_error", "sink")) == tried, "no further retries"
            other.config_set("requirepass", "wrong")
            run.start_sink("late")
            wait_until(lambda: watched.state("late") == "ok", what="catching up", timeout_s=60)
        assert sorted(numbers(redis.Redis(port=guarded.port, password="wrong"))) == list(range(300))


def test_a_required_sink_with_a_wrong_password_is_refused_before_anything_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    with RedisProcess(["--requirepass", "right"]) as guarded:
        wrong = redis_sink(guarded.url.replace("://", "://:wrong@"))
        with pytest.raises(SpecRefused, match="AuthenticationFailed"):
            run_once(spark, pipeline(tmp_path, sinks=[wrong]))


def test_source_outage_is_waited_for(spark: SparkSession, redis_server: RedisProcess, tmp_path: Path) -> None:
    client = redis.Redis(port=redis_server.port)
    with RedisProcess(["--appendonly", "yes", "--appendfsync", "always"]) as origin:
        theirs = redis.Redis(port=origin.port)
        limits = {"batch_timeout": "300ms", "connect_timeout": "200ms", "send_timeout": "200ms"}
        source = {"type": "redis", "config": {"uri": origin.url, "stream": "in", **limits}}
        theirs.xadd("in", {"event": '{"n": 0}'})
        sinks = [redis_sink(redis_server.url, **PATIENT)]
        with Watched(spark, pipeline(tmp_path, source=source, sinks=sinks, dlq={"enabled": False})) as watched:
            run = watched.runner.runs["orders"]
            wait_until(lambda: client.xlen("out") == 1, what="the first entry", timeout_s=120)
            origin.kill()
            wait_until(
                lambda: run.check() and run.status().source == "retrying", what="an attempt that failed", timeout_s=60
            )
            assert run.status().state == "running"
            origin.start()
            redis.Redis(port=origin.port).xadd("in", {"event": '{"n": 1}'})
            wait_until(lambda: run.check() and client.xlen("out") == 2, what="the second entry", timeout_s=120)
            wait_until(lambda: run.check() and run.status().source == "ok", what="that it is well", timeout_s=60)
            assert run.status().sinks == {"main": "ok"}
        assert values(watched.facts, "pipeline.source_error", "attempt")
        assert not values(watched.facts, "pipeline.sink_error", "sink"), "no sink was to blame"


def test_failed_pipeline_continues_after_a_restart(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    client = redis.Redis(port=redis_server.port)
    client.set("out", "no stream")
    with Watched(spark, pipeline(tmp_path, sinks=[redis_sink(redis_server.url, **PATIENT)])) as watched:
        run = watched.runner.runs["orders"]
        wait_until(lambda: run.check() == "failed", what="a key that is no stream", timeout_s=120)
        client.delete("out")
        run.start()
        wait_until(lambda: run.check() and client.xlen("out") == 300, what="all rows", timeout_s=120)
        assert run.status().error is None
    assert sorted(numbers(client)) == list(range(300))


def test_a_stream_keeps_its_order_and_rows_are_counted_once(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    """5,000 rows, read as they are by default; two sinks of different shapes read the batch twice."""
    client = redis.Redis(port=redis_server.port)
    pipe = client.pipeline()
    for n in range(5_000):
        pipe.xadd("in", {"event": json.dumps({"n": n})})
    pipe.execute()
    source = {"type": "redis", "config": {"uri": redis_server.url, "stream": "in"}}
    second = redis_sink(redis_server.url, "second", stream="second", envelope="raw", **PATIENT)
    made = pipeline(
        tmp_path, source=source, sinks=[redis_sink(redis_server.url, **PATIENT), second], batch={"max_events": 5_000}
    )
    facts = run_once(spark, made)
    assert [json.loads(entry["event"])["after"]["n"] for entry in entries(client)] == list(range(5_000))
    assert [json.loads(entry["event"])["n"] for entry in entries(client, "second")] == list(range(5_000))
    assert sum(values(facts, "pipeline.batch", "events")) == 5_000
    rows = [facts_["rows"] for name, facts_ in facts if name == "pipeline.progress"]
    assert set(rows) <= {5_000}


def test_a_row_above_the_limit_of_an_entry_is_refused_as_the_broker_refuses_it(
    spark: SparkSession, redis_server: RedisProcess
) -> None:
    rows = spark.range(2).selectExpr("repeat('x', CAST(id * 68000000 AS INT)) AS value")
    with pytest.raises(Exception, match=PayloadTooLarge.__name__):
        rows.coalesce(1).write.format("redis_streams").mode("append").options(url=redis_server.url, stream="s").save()
    assert redis.Redis(port=redis_server.port).xlen("s") == 0


def test_query_stopped_from_outside_is_a_failure(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    """Spark ends it without an error: nothing is wrong, and nothing is read any more."""
    client = redis.Redis(port=redis_server.port)
    with Watched(spark, pipeline(tmp_path, sinks=[redis_sink(redis_server.url, **PATIENT)])) as watched:
        run = watched.runner.runs["orders"]
        wait_until(lambda: client.xlen("out") == 300, what="all rows", timeout_s=120)
        assert run._query is not None
        run._query.stop()
        wait_until(lambda: run.check() == "failed", what="that it is noticed", timeout_s=60)
        assert "without an error" in (run.status().error or "")
