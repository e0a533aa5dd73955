"""Failures of the Redis of a required sink: no row is lost, duplicated or partly written."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, numbers, pipeline, redis_sink, run_once, values

from millstream.pipelines.errors import SinkFailed, SpecRefused
from millstream.pipelines.runner import Runner
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.testing import RedisProcess, wait_until
from millstream.testing.topologies import SentinelSetup

pytestmark = pytest.mark.spark

REFUSED = {"batch_timeout": "3s", "connect_timeout": "3s", "send_timeout": "3s"}
"""Long enough that a refusal arrives before the deadline: the error must name it."""


def later(seconds: float, work: object) -> threading.Timer:
    timer = threading.Timer(seconds, work)  # type: ignore[arg-type]  # any callable
    timer.start()
    return timer


def errors_then(spark: SparkSession, made: Pipeline, repair: object, *, words: tuple[str, ...] = ("",)) -> list[str]:
    """Runs until the sink has failed with one of the words, repairs it, and runs the pipeline to its end."""
    failed = threading.Event()
    reported: list[str] = []

    def observer(name: str, /, **facts: object) -> None:
        if name == "pipeline.sink_error":
            reported.append(str(facts["error"]))
            if any(word in reported[-1] for word in words):
                failed.set()

    runner = Runner([made], once=True, session=spark, observer=observer).start()
    try:
        assert failed.wait(90), "the sink never failed"
        assert runner.named("orders").status().sinks == {"main": "retrying"}
        repair()  # type: ignore[operator]  # any callable
        assert runner.wait()
        assert runner.named("orders").status().sinks == {"main": "ok"}
    finally:
        runner.close()
    return reported


def test_server_restarts(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        server.kill()
        errors_then(spark, pipeline(tmp_path, sinks=[redis_sink(server.url)]), server.start)
        assert sorted(numbers(redis.Redis(port=server.port))) == list(range(300))


def test_a_wrong_password_fails_at_once(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess(["--requirepass", "right"]) as server:
        wrong = server.url.replace("://", "://:wrong@")
        with pytest.raises(SpecRefused, match="AuthenticationFailed") as refused:
            run_once(spark, pipeline(tmp_path, sinks=[redis_sink(wrong)]))
        assert "wrong@" not in str(refused.value)
        right = server.url.replace("://", "://:right@")
        run_once(spark, pipeline(tmp_path, sinks=[redis_sink(right)]))
        redis.Redis(port=server.port, password="right").config_set("requirepass", "changed")
        source = {"type": "generator", "config": {"rows": 400, "start_ts_ms": 1_700_000_000_000}}
        made = pipeline(tmp_path, source=source, sinks=[redis_sink(right)])
        with pytest.raises(SpecRefused, match="AuthenticationFailed"):
            run_once(spark, made)


def test_a_password_that_is_changed_while_it_runs_stops_the_pipeline_at_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        source = {"type": "generator", "config": {"rows": 100_000, "rate": 200}}
        made = pipeline(tmp_path, source=source, sinks=[redis_sink(server.url, **REFUSED)])
        runner = Runner([made], session=spark).start()
        try:
            run = runner.named("orders")
            wait_until(lambda: client.xlen("out") > 0, what="the first batch", timeout_s=90)
            client.config_set("requirepass", "new")
            client.execute_command("AUTH", "new")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            wait_until(lambda: run.check() == "failed", what="the pipeline to stop", timeout_s=90)
            assert isinstance(run.error, SinkFailed)
            assert run.error.attempts <= 2
        finally:
            runner.close()


def test_out_of_memory_in_mid_batch(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        source = {"type": "generator", "config": {"rows": 4000}}
        sink = redis_sink(server.url, **REFUSED)
        made = pipeline(tmp_path, source=source, sinks=[sink], batch={"max_events": 4000})
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 500_000)

        def repair() -> None:
            held = client.xlen("out")
            assert held < 4000
            assert held % 1000 == 0, "a chunk is written whole, or not at all"
            client.config_set("maxmemory", 0)

        reported = errors_then(spark, made, repair, words=("OOM", "OutOfMemory"))
        assert any("OOM" in text or "OutOfMemory" in text for text in reported)
        assert sorted(numbers(client)) == list(range(4000))


def test_the_server_hangs(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        server.signal(signal.SIGSTOP)
        try:
            made = pipeline(tmp_path, sinks=[redis_sink(server.url)])
            errors_then(spark, made, lambda: server.signal(signal.SIGCONT))
        finally:
            server.signal(signal.SIGCONT)
        assert sorted(numbers(redis.Redis(port=server.port))) == list(range(300))


def test_the_server_is_a_replica_for_a_while(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as primary, RedisProcess() as server:
        client = redis.Redis(port=server.port)
        client.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", what="replication")
        made = pipeline(tmp_path, sinks=[redis_sink(server.url, **REFUSED)])
        reported = errors_then(spark, made, lambda: client.replicaof("NO", "ONE"), words=("READONLY", "ReadOnly"))
        assert any("READONLY" in text or "ReadOnly" in text for text in reported)
        assert sorted(numbers(client)) == list(range(300))


def test_connections_are_cut_again_and_again(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        stop = threading.Event()

        def cut() -> None:
            while not stop.wait(0.05):
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            source = {"type": "generator", "config": {"rows": 3000}}
            run_once(
                spark, pipeline(tmp_path, source=source, sinks=[redis_sink(server.url)], batch={"max_events": 500})
            )
        finally:
            stop.set()
            cutter.join()
        assert sorted(numbers(client)) == list(range(3000))


def test_a_deadline_stops_the_pipeline_and_nothing_is_skipped(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        server.kill()
        made = pipeline(tmp_path, sinks=[redis_sink(server.url)], retry={"initial": "10ms", "deadline": "1s"})
        with pytest.raises(SinkFailed, match="did not take the batch"):
            run_once(spark, made)
        server.start()
        facts = run_once(spark, pipeline(tmp_path, sinks=[redis_sink(server.url, **PATIENT)]))
        assert sorted(numbers(redis.Redis(port=server.port))) == list(range(300))
        assert values(facts, "pipeline.batch", "batch")[0] == 0


def test_stop_does_not_wait_for_an_unreachable_sink(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        server.kill()
        made = pipeline(tmp_path, sinks=[redis_sink(server.url)])
        failed = threading.Event()
        runner = Runner(
            [made], session=spark, observer=lambda name, **_: failed.set() if name.endswith("error") else None
        )
        runner.start()
        try:
            assert failed.wait(90)
            runner.named("orders").stop()
            assert runner.named("orders").state == "stopped"
        finally:
            runner.close()
        server.start()
        run_once(spark, made)
        assert sorted(numbers(redis.Redis(port=server.port))) == list(range(300))


def test_stop_reports_a_permanent_error_of_the_last_batch(spark: SparkSession, tmp_path: Path) -> None:
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        hangs = threading.Event()

        def observer(name: str, /, **details: object) -> None:
            if name == "pipeline.batch" and details["batch"] == 0:  # between two batches
                client.delete("out")
                client.set("out", "not a stream")
                server.signal(signal.SIGSTOP)
                hangs.set()

        runner = Runner(
            [pipeline(tmp_path, sinks=[redis_sink(server.url, **PATIENT)])], session=spark, observer=observer
        ).start()
        run = runner.named("orders")
        stopping = threading.Thread(target=run.stop)
        try:
            assert hangs.wait(90)
            wait_until(lambda: run._gate.inside == 1, what="the next batch to be under way", timeout_s=60)
            stopping.start()
            wait_until(run._gate.closing.is_set, what="stopping to wait for it", timeout_s=60)
        finally:
            server.signal(signal.SIGCONT)
        stopping.join(90)
        runner.close()
    assert run.state == "failed"
    assert isinstance(run.error, SinkFailed)
    assert "WRONGTYPE" in str(run.error)


def test_one_of_two_required_sinks_fails_while_the_other_has_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    """Both are written in one pass: the reachable sink has the batch at once, the other one later, neither twice."""
    with RedisProcess() as steady, RedisProcess() as shaky:
        sinks = [redis_sink(shaky.url, "shaky"), redis_sink(steady.url, "steady", **PATIENT)]
        source = {"type": "generator", "config": {"rows": 600, "start_ts_ms": 1_700_000_000_000}}
        events: list[tuple[str, dict[str, object]]] = []
        killed, failed = threading.Event(), threading.Event()

        def observer(name: str, /, **details: object) -> None:
            events.append((name, details))
            if name == "pipeline.batch" and details["batch"] == 1:
                shaky.kill()  # between two batches: the pass of the next one finds one of its places gone
                killed.set()
            if name == "pipeline.sink_error":
                failed.set()

        runner = Runner(
            [pipeline(tmp_path, source=source, sinks=sinks)], once=True, session=spark, observer=observer
        ).start()
        try:
            assert killed.wait(90)
            assert failed.wait(90)
            here = redis.Redis(port=steady.port)
            wait_until(lambda: here.xlen("out") == 300, what="the steady sink's batch", timeout_s=90)
            assert runner.named("orders").status().sinks == {"shaky": "retrying", "steady": "ok"}
            shaky.start()
            assert runner.wait()
        finally:
            runner.close()
        assert runner.named("orders").error is None
        assert sorted(numbers(here)) == list(range(600))
        # The server without a disk restarted empty. Only rows that it had confirmed before are missing.
        assert sorted(numbers(redis.Redis(port=shaky.port))) == list(range(200, 600))
        errors = {details["sink"] for name, details in events if name == "pipeline.sink_error"}
        assert errors == {"shaky"}
        taken = [
            (details["sink"], details["batch"], details["rows"]) for name, details in events if name == "pipeline.sink"
        ]
        assert sorted(taken) == sorted((sink, batch, 100) for sink in ("shaky", "steady") for batch in range(6))


def test_a_failover_while_batches_are_written(spark: SparkSession, tmp_path: Path) -> None:
    """The sink asks the sentinels for the new primary, and continues at the position that the stream has stored."""
    with SentinelSetup() as setup:
        source = {"type": "generator", "config": {"rows": 100_000, "rate": 500}}
        sink = redis_sink(setup.url, batch_timeout="5s", connect_timeout="2s")
        runner = Runner([pipeline(tmp_path, source=source, sinks=[sink])], session=spark).start()
        try:
            old, new = redis.Redis(port=setup.primary.port), redis.Redis(port=setup.replica.port)
            wait_until(lambda: old.xlen("out") > 200, what="some batches", timeout_s=90)
            # Entries that the replica does not have when the primary dies are lost for every writer. So pause,
            # let the replica have everything, and let the primary die before the next batch.
            runner.named("orders").pause()
            wait_until(lambda: new.xlen("out") == old.xlen("out"), what="the replica")
            held = old.xlen("out")
            setup.primary.kill()
            runner.named("orders").resume()
            wait_until(lambda: new.xlen("out") > held + 100, what="batches at the new primary", timeout_s=90)
            assert new.info("replication")["role"] == "master"
            runner.named("orders").stop()
        finally:
            runner.close()
        result = sorted(numbers(new))
        assert result == list(range(len(result)))
