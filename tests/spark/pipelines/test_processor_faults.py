"""A processor that fails permanently stops its pipeline at once, with its name and the cause, without a commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import Facts, pipeline, redis_sink, run_once, values

from millstream.pipelines.errors import ProcessorFailed, SpecRefused
from millstream.pipelines.runner import Runner
from millstream.pipelines.spec.pipeline import Pipeline
from millstream.testing import RedisProcess

pytestmark = pytest.mark.spark

ZERO = "SELECT id, op, `table`, ts_ms, 1 / (length(id) - length(id)) AS share FROM events"
FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a column that is not there": (
        {"type": "sql", "id": "shares", "query": "SELECT id, op, nowhere FROM events"},
        ["'shares' (sql)", "UNRESOLVED_COLUMN", "nowhere"],
    ),
    "a division by zero": ({"type": "sql", "id": "shares", "query": ZERO}, ["'shares' (sql)", "DIVIDE_BY_ZERO"]),
    "a function that raises": (
        {"type": "python", "id": "own", "function": "pipeline_functions:always_raises", "on_error": "stop"},
        ["'own' (python)", "ValueError: planted"],
    ),
}
SEEN_BEFORE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no SQL at all": ({"type": "sql", "query": "SELEKT id FROM events"}, ["processors[0]", "SELEKT"]),
    "a function that is not there": (
        {"type": "python", "function": "pipeline_functions:nowhere"},
        ["processors[0]", "nowhere"],
    ),
}


def failed(spark: SparkSession, made: Pipeline) -> tuple[BaseException | None, list[str]]:
    """Runs until the pipeline has failed; returns the error, and the sink errors that were emitted before."""
    reported: list[str] = []

    def observer(name: str, /, **facts: object) -> None:
        if name == "pipeline.sink_error":
            reported.append(str(facts["error"]))

    runner = Runner([made], once=True, session=spark, observer=observer).start()
    try:
        assert runner.wait() is False
        return runner.named("orders").error, reported
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("fault", "sinks"),
    [
        ("a column that is not there", 2),  # seen when the plan is made, before any sink
        ("a division by zero", 1),
        ("a division by zero", 2),  # seen while rows are made: for one sink in the pass that writes them
        ("a function that raises", 1),
    ],
)
def test_permanent_error_is_not_retried(
    fault: str, sinks: int, spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    processor, words = FAULTS[fault]
    outs = [redis_sink(redis_server.url, name, stream=name) for name in ("a", "b")[:sinks]]
    error, reported = failed(spark, pipeline(tmp_path, processors=[processor], sinks=outs))
    assert isinstance(error, ProcessorFailed), error
    for word in words:
        assert word in str(error)
    assert reported == [], "no sink was at fault"
    assert redis.Redis(port=redis_server.port).xlen("a") == 0
    corrected = pipeline(tmp_path, sinks=outs)
    with pytest.raises(Exception, match="batch 0 is not committed"):
        run_once(spark, corrected)


@pytest.mark.parametrize("fault", SEEN_BEFORE)
def test_static_problems_are_refused_before_planning(
    fault: str, spark: SparkSession, redis_server: RedisProcess, tmp_path: Path
) -> None:
    processor, words = SEEN_BEFORE[fault]
    outs = [redis_sink(redis_server.url)]
    with pytest.raises(SpecRefused) as refused:
        failed(spark, pipeline(tmp_path, processors=[processor], sinks=outs))
    for word in words:
        assert word in str(refused.value)
    run_once(spark, pipeline(tmp_path, sinks=outs))  # the corrected pipeline starts from the beginning


def test_processor_time_is_reported_with_its_step(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    mask = [{"type": "mask", "fields": {"email": "redact"}}]
    first, shared = [redis_sink(redis_url)], [redis_sink(redis_url), redis_sink(redis_url, "b", stream="b")]
    two = [redis_sink(redis_url), redis_sink(redis_url, "b", stream="b", envelope={"type": "debezium"})]

    def steps(name: str, **spec: Any) -> set[str]:
        facts: Facts = run_once(spark, pipeline(tmp_path, name, **spec))
        times = values(facts, "pipeline.processors", "s")
        assert all(time > 0 for time in times)
        assert len(times) in (0, len(values(facts, "pipeline.batch", "batch")))
        return set(values(facts, "pipeline.processors", "step"))

    assert steps("one", sinks=first, processors=mask) == {"compute_and_write"}
    assert steps("shared", sinks=shared, processors=mask) == {"compute_and_write"}
    assert steps("two", sinks=two, processors=mask) == {"compute"}
    assert steps("none", sinks=two) == set()
