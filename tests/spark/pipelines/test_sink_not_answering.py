"""A sink whose server is down when the pipeline starts is shown as such, also while no batch is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from running import pipeline, redis_sink

from millstream.pipelines import Runner
from millstream.testing import RedisProcess, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


@pytest.mark.parametrize("required", [True, False])
def test_sink_that_is_down_at_the_start_is_shown_until_it_answers(
    spark: SparkSession, redis_server: RedisProcess, tmp_path: Path, required: bool
) -> None:
    source = {"type": "redis", "config": {"uri": redis_server.url, "stream": "empty"}}
    with RedisProcess() as server:
        server.kill()
        sinks = [redis_sink(server.url, "late", required=required), redis_sink(redis_server.url)]
        with Runner([pipeline(tmp_path, source=source, sinks=sinks)], session=spark) as runner:
            run = runner.named("orders")
            assert run.status().sinks["late"] == "not answering"
            assert run.status().sinks["main"] == "ok"
            server.start()
            wait_until(lambda: run.status().sinks["late"] == "ok", what="the sink to answer", timeout_s=60)
