"""An optional sink that is down for a minute catches up in order, while the pipeline continues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, numbers, pipeline, redis_sink

from millstream.pipelines.runner import Runner
from millstream.testing import RedisProcess, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600)]

OUTAGE_S = 60 if int(os.environ.get("TRIALS", "2")) >= 20 else 4
RATE = 200


def test_sink_restarts(spark: SparkSession, redis_server: RedisProcess, tmp_path: Path) -> None:
    client = redis.Redis(port=redis_server.port)
    states: list[object] = []
    with RedisProcess(["--appendonly", "yes", "--appendfsync", "always"]) as other:
        theirs = redis.Redis(port=other.port)
        sinks = [redis_sink(redis_server.url, **PATIENT), redis_sink(other.url, "optional", required=False)]
        source = {"type": "generator", "config": {"rate": RATE, "partitions": 1}}
        made = pipeline(tmp_path, source=source, sinks=sinks)
        runner = Runner(
            [made],
            session=spark,
            observer=lambda name, **facts: states.append(facts["state"]) if name == "pipeline.status" else None,
        ).start()
        try:
            run = runner.named("orders")
            wait_until(lambda: theirs.xlen("out") > 0, what="the optional sink's first batch", timeout_s=90)
            before = client.xlen("out")
            other.kill()
            # The generator makes RATE rows a second by the clock: rows in the required sink measure the outage.
            missed = before + RATE * OUTAGE_S
            wait_until(lambda: client.xlen("out") >= missed, what="the outage to last", timeout_s=OUTAGE_S + 120)
            assert run.status().sinks == {"main": "ok", "optional": "failing"}
            other.start()
            wait_until(lambda: theirs.xlen("out") >= missed, what="catching up", timeout_s=OUTAGE_S + 120)
            wait_until(lambda: run.status().sinks["optional"] == "ok", what="an empty queue", timeout_s=90)
            run.stop()
        finally:
            runner.close()
        assert states == ["running", "stopped"], "nothing was started again"
        result = numbers(theirs)
        print(f"LEDGER outage_s={OUTAGE_S} delivered={len(result)} required={client.xlen('out')}")
        assert result == list(range(len(result)))
        assert numbers(client) == list(range(client.xlen("out")))
