"""Pipelines that write into one stream by event id, and one pipeline before and after a reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import PATIENT, entries, forget_last_commit, pipeline, redis_sink, run_once, values

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.plan import make_plan
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.testing import RedisProcess

pytestmark = pytest.mark.spark

SQL = {"type": "sql", "query": "SELECT count(*) AS n FROM events"}
KEEP = {"type": "sql", "query": "SELECT * FROM events"}
AGGREGATE = {"type": "aggregate", "window": "10ms", "watermark": "1ms", "measures": {"n": "count"}}


@pytest.fixture
def client(redis_server: RedisProcess) -> redis.Redis:
    return redis.Redis(port=redis_server.port)


def of_tenant(made: Pipeline, tenant: str) -> Pipeline:
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"tenant": tenant})})


@pytest.mark.parametrize("processor", [SQL, KEEP, AGGREGATE], ids=["sql", "sql keeping ids", "aggregate"])
def test_pipelines_that_share_a_stream_do_not_skip_each_other_s_events(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path, processor: dict[str, Any]
) -> None:
    made = [
        pipeline(tmp_path / where, name, sinks=[redis_sink(redis_url, **PATIENT)], processors=[processor])
        for where, name in (("1", "orders"), ("2", "billing"), ("3", "orders"))
    ]
    made[2] = of_tenant(made[2], "other")
    lengths = []
    for each in made:
        facts = run_once(spark, each)
        assert sum(values(facts, "pipeline.sink", "skipped")) == 0
        lengths.append(client.xlen("out"))
    assert lengths[0] > 0
    assert lengths == [lengths[0], 2 * lengths[0], 3 * lengths[0]]
    if processor is not KEEP:
        assert len({entry["id"] for entry in entries(client)}) == lengths[2], "ids name tenant and pipeline"


def test_after_a_reset_everything_is_written_again(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    made = pipeline(tmp_path, sinks=[redis_sink(redis_url, **PATIENT)], processors=[KEEP])
    run_once(spark, made)
    forget_last_commit(made)
    facts = run_once(spark, made)
    assert client.xlen("out") == 300, "a replayed batch adds nothing"
    assert (sum(values(facts, "pipeline.sink", "added")), sum(values(facts, "pipeline.sink", "skipped"))) == (0, 100)
    plan = make_plan(made)
    Checkpoint(made.checkpoint_path).reset(plan)
    facts = run_once(spark, made)
    assert client.xlen("out") == 600
    assert (sum(values(facts, "pipeline.sink", "added")), sum(values(facts, "pipeline.sink", "skipped"))) == (300, 0)
