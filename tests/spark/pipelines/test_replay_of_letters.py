"""A replay sends each dead letter unchanged, and one that cannot be sent does not block others."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from running import entries, pipeline, redis_sink, run_once

from millstream.pipelines.dead_letters import replay_dead_letters
from millstream.pipelines.plan import make_plan

pytestmark = pytest.mark.spark


MARK = Path(tempfile.gettempdir()) / f"millstream-test-broken-{os.getuid()}"
"""The function runs in another process, and reads there whether it is to fail."""


def refuses_broken(batch: Any) -> Any:
    """A function of a pipeline: it fails while an event is broken."""
    if any(json.loads(text)["id"] == 2 for text in batch.column("after").to_pylist()) and MARK.exists():
        raise ValueError("broken")
    return batch


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    return client


def test_replayed_event_keeps_its_routed_stream_and_unknown_stages_block_nothing(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    for number in (1, 2):
        client.xadd("in", {"event": json.dumps({"id": number}), "key": f"k{number}"}, id=f"{number}000-0")
    client.xadd("in", {"event": "no json"}, id="3000-0")
    MARK.touch()
    rule = {"when": {"where": {"all": [{"field": "row.id", "gt": 0}]}}, "stream": "routed"}
    spec: dict[str, Any] = {
        "source": {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        "processors": [
            {"type": "route", "rules": [rule]},
            {"type": "python", "function": "test_replay_of_letters:refuses_broken"},
        ],
        "sinks": [redis_sink(redis_url, stream="fallback${after.nothing}")],
    }
    made = pipeline(tmp_path, **spec)
    try:
        run_once(spark, made)
    finally:
        MARK.unlink()
    letters = client.xrange("acme:orders.dlq")
    assert sorted(fields[b"stage"] for _, fields in letters) == [b"processors[1]", b"source"]
    for entry_id, fields in letters:
        if fields[b"stage"] == b"source":  # an operator has corrected the input, in the form that the source reads
            assert (fields[b"ts_ms"], fields[b"source"]) == (b"3000", b"in")
            client.xdel("acme:orders.dlq", entry_id)
            client.xadd("acme:orders.dlq", {**fields, b"payload": b'{"id":3}'})
    gone = dict(letters[0][1]) | {b"stage": b"removed", b"id": b"x"}
    client.xadd("acme:orders.dlq", gone)
    done = replay_dead_letters(spark, make_plan(made))
    assert (done.delivered, done.failed_again, sum(done.kept.values())) == (2, 0, 1)
    events = {
        json.loads(entry["event"])["after"]["id"]: json.loads(entry["event"]) for entry in entries(client, "routed")
    }
    assert sorted(events) == [1, 2, 3]
    assert [events[number]["ts_ms"] for number in (1, 2, 3)] == [1000, 2000, 3000]
    assert [events[number]["source"]["name"] for number in (1, 2, 3)] == ["in"] * 3
    assert client.xlen("acme:orders.dlq") == 1


def test_dead_letters_of_stages_before_an_aggregate_are_kept_and_later_ones_are_replayed(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    aggregate = {"type": "aggregate", "id": "sums", "window": "1m", "measures": {"n": "count"}}
    source = {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}}
    plan = make_plan(pipeline(tmp_path, source=source, processors=[aggregate], sinks=[redis_sink(redis_url)]))
    own = {"id": "a", "reason": "r", "table": "sums", "tenant": "acme", "pipeline": "orders"}
    client.xadd("acme:orders.dlq", own | {"stage": "source", "payload": "{}"})
    row = {"id": "a", "op": "c", "ts_ms": 1, "before": None, "after": {"n": 1}}
    client.xadd("acme:orders.dlq", own | {"stage": "sink:main", "payload": json.dumps(row)})
    done = replay_dead_letters(spark, plan)
    assert (done.delivered, done.failed_again, sum(done.kept.values())) == (1, 0, 1)
    assert client.xlen("out") == client.xlen("acme:orders.dlq") == 1


def test_replayed_input_keeps_the_identity_that_the_source_gives_it(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Producers may repeat the ids in their documents: a letter must not be deleted because another one has its id."""
    source = {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest", "format": "native"}}
    made = pipeline(tmp_path, source=source, sinks=[redis_sink(redis_url)])
    letter = {"reason": "r", "stage": "source", "table": "in", "tenant": "acme", "pipeline": "orders"}
    for number in (1, 2):
        document = {"id": "same", "op": "c", "after": {"n": number}}
        client.xadd("acme:orders.dlq", letter | {"id": f"in:{number}-0", "payload": json.dumps(document)})
    assert replay_dead_letters(spark, make_plan(made)).delivered == 2
    assert [entry["id"] for entry in entries(client)] == ["in:1-0", "in:2-0"]
