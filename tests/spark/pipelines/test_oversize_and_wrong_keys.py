"""An event that a sink can never store becomes a dead letter; the pipeline continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from frames import event, events, through
from pyspark.sql import SparkSession
from running import PATIENT, entries, pipeline, redis_sink, run_once

from millstream.pipelines.errors import SinkFailed
from millstream.pipelines.sinks.redis import RedisSink

pytestmark = pytest.mark.spark


def large_value(batch: Any) -> Any:
    """A function of a pipeline: rows with ``mb`` grow to so many MB."""
    import pyarrow as pa

    grown = []
    for text in batch.column("after").to_pylist():
        row = json.loads(text)
        grown.append(json.dumps(row | {"big": "x" * (row.get("mb", 0) << 20)}))
    return batch.set_column(batch.schema.names.index("after"), "after", pa.array(grown))


def source(url: str) -> dict[str, Any]:
    return {"type": "redis", "config": {"uri": url, "streams": ["in"], "start": "earliest"}}


def ids(client: redis.Redis, stream: str) -> list[int]:
    return sorted(json.loads(entry["event"])["after"]["id"] for entry in entries(client, stream))


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    return client


def test_flattened_row_that_grows_without_bound(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    bomb = {"x" * 50_000: {f"k{number}": number for number in range(3000)}}
    for row in ({"id": 1}, bomb, {"id": 2, "a": {"b": 3}}):
        client.xadd("in", {"event": json.dumps(row)})
    sinks = [redis_sink(redis_url, **PATIENT)]
    made = pipeline(tmp_path, source=source(redis_url), processors=[{"type": "flatten"}], sinks=sinks)
    run_once(spark, made)
    assert ids(client, "out") == [1, 2]
    [letter] = entries(client, "acme:orders.dlq")
    assert letter["stage"] == "processors[0]"
    assert json.loads(letter["payload"])["after"] == bomb


def test_result_above_the_limit(spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    for row in ({"id": 1}, {"id": 2, "mb": 33}, {"id": 3}):
        client.xadd("in", {"event": json.dumps(row)})
    processors = [{"type": "python", "function": "test_oversize_and_wrong_keys:large_value"}]
    sinks = [redis_sink(redis_url, **PATIENT)]
    run_once(spark, pipeline(tmp_path, source=source(redis_url), processors=processors, sinks=sinks))
    assert ids(client, "out") == [1, 3]
    [letter] = entries(client, "acme:orders.dlq")
    assert letter["stage"] == "processors[0]"
    assert len(letter["payload"]) < 10_000


def test_query_result_above_the_limit(spark: SparkSession) -> None:
    query = "SELECT id, op, to_json(named_struct('x', if(id = 's:1', repeat('x', 34000000), 'y'))) AS after FROM events"
    rows = through(spark, [event(1, {"a": 1}), event(2, {"a": 1})], type="sql", query=query)
    assert [row["stage"] for row in rows] == ["processors[0]", None]
    assert rows[1]["after"] == {"x": "y"}


@pytest.mark.parametrize("stream", ["out", "out.${after.to}"])
def test_sink_names_the_entry_that_was_too_large(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr("millstream.pipelines.sinks.redis.MAX_ENTRY_BYTES", 100)
    sink = RedisSink.model_validate(redis_sink("redis://127.0.0.1:1", stream=stream, key="${after.to}"))
    frame = events(spark, [event(1, {"to": "a"}), event(2, {"to": "x" * 60})])
    assert sink.learn_from(SinkFailed("main", 1, "PayloadTooLarge: row for stream"), frame, "acme")
    assert [row["id"] for row in sink.prepare(frame, "acme").collect()] == ["s:1"]
    lost = sink.unroutable(frame, "acme")
    assert lost is not None
    assert [(row["id"], row["stage"]) for row in lost.collect()] == [("s:2", "sink:main")]
    assert not sink.learn_from(SinkFailed("main", 1, "PayloadTooLarge: row for stream"), frame, "acme")


def test_stream_that_names_a_key_of_another_type(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    client.set("to.taken", "text")
    for number, name in enumerate(["free", "taken", "free", "taken", "other"]):
        client.xadd("in", {"event": json.dumps({"id": number, "to": name})})
    sinks = [redis_sink(redis_url, stream="to.${after.to}", **PATIENT)]
    run_once(spark, pipeline(tmp_path, source=source(redis_url), sinks=sinks))
    assert (ids(client, "to.free"), ids(client, "to.other")) == ([0, 2], [4])
    letters = entries(client, "acme:orders.dlq")
    assert [letter["stage"] for letter in letters] == ["sink:main"] * 2
    assert client.get("to.taken") == b"text"
