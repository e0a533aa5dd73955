"""Pipelines run to their end in the tests' session, and what Redis then holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import SparkSession

from millstream.pipelines.runner import Runner
from millstream.pipelines.spec.pipeline import Pipeline

Facts = list[tuple[str, dict[str, Any]]]
QUICK = {"initial": "20ms", "max": "200ms", "deadline": "60s"}


PATIENT = {"batch_timeout": "20s", "connect_timeout": "10s", "send_timeout": "10s"}
"""Limits for a sink that must not fail on a busy machine."""


def redis_sink(url: str, name: str = "main", **config: Any) -> dict[str, Any]:
    limits = {"batch_timeout": "1s", "connect_timeout": "500ms", "send_timeout": "500ms"}
    return {"type": "redis", "config": {"id": name, "uri": url, "stream": "out", **limits, **config}}


def pipeline(directory: Path, name: str = "orders", **spec: Any) -> Pipeline:
    whole = {
        "source": {"type": "generator", "config": {"rows": 300, "start_ts_ms": 1_700_000_000_000}},
        "retry": QUICK,
        "batch": {"max_events": 100},
        "checkpoint": {"path": str(directory / name)},
        **spec,
    }
    head = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": name, "tenant": "acme"}}
    return Pipeline.model_validate({**head, "spec": whole})


def run_once(spark: SparkSession, *pipelines: Pipeline) -> Facts:
    """Runs until the available rows are processed. Raises the error of a failed pipeline."""
    facts: Facts = []
    runner = Runner(pipelines, once=True, session=spark, observer=lambda name, **facts_: facts.append((name, facts_)))
    runner.start()
    try:
        runner.wait()
    finally:
        runner.close()
    for run in runner.runs.values():
        if run.error is not None:
            raise run.error
        assert run.state == "finished"
    return facts


def values(facts: Facts, name: str, key: str) -> list[Any]:
    return [result[key] for reported, result in facts if reported == name]


def entries(client: redis.Redis, stream: str = "out") -> list[dict[str, str]]:
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in client.xrange(stream)]


def documents(client: redis.Redis, stream: str = "out") -> list[dict[str, Any]]:
    return [json.loads(entry["event"]) for entry in entries(client, stream)]


def numbers(client: redis.Redis, stream: str = "out") -> list[int]:
    """The row numbers of generated events, in the stream's order."""
    return [int(entry["id"].rpartition(":")[2]) for entry in entries(client, stream)]


def forget_last_commit(made: Pipeline) -> int:
    """The state after a crash between the sinks' writes and Spark's commit: the batch is planned, and not committed."""
    commits = Path(made.checkpoint_path) / "spark" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for path in (commits / str(last), commits / f".{last}.crc"):
        path.unlink(missing_ok=True)
    return last
