"""A masked value is in no output, error, dead letter or queue: a canary in nested, listed and renamed fields."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from pyspark.sql import SparkSession
from running import entries, pipeline, redis_sink, run_once

from millstream.pipelines.dead_letters import replay_dead_letters
from millstream.pipelines.plan import make_plan

pytestmark = pytest.mark.spark

CANARY = "canary-4711"
TOKEN = "c0ffee47" * 8
"""A value that looks like a hash."""
ROWS = [
    {"id": 1, "token": TOKEN, "contact": {"email": CANARY, "phones": [{"number": CANARY}, {"number": None}]}},
    {"id": 2, "contact.email": CANARY, "old": CANARY},
    {"id": 3, "contact": [{"email": CANARY, "deep": {"x": "1.10"}}]},
    {"id": 4, "fail": True, "token": TOKEN, "old": CANARY, "contact": {"email": CANARY}},
]
MASKS = {
    "type": "mask",
    "fields": {"contact.email": "hash", "contact.phones.number": "redact", "new": "redact", "token": "hash"},
}


def raises_with_the_row(batch: pa.RecordBatch) -> pa.RecordBatch:
    for row in batch.column("after").to_pylist():
        if "fail" in row:
            raise ValueError(f"cannot take {row}")
    return batch


def put(client: redis.Redis, documents: list[str]) -> None:
    for document in documents:
        client.xadd("in", {"event": document})


def everything(client: redis.Redis, *streams: str) -> str:
    return json.dumps([entries(client, stream) for stream in streams])


def test_no_output_error_dead_letter_or_queue_holds_what_is_masked(
    spark: SparkSession, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    bad = [
        f"{CANARY} {{",
        f'{{"payload":{{"op":"x","after":{{"new":"{CANARY}"}}}}}}',
    ]
    put(client, [*map(json.dumps, ROWS), *bad])
    named_by_source = {"id": 5, "old": CANARY}
    client.xadd("in", {"event": json.dumps(named_by_source), "key": json.dumps(named_by_source)})
    made = pipeline(
        tmp_path,
        source={"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        processors=[
            {"type": "rename", "fields": {"old": "new"}},
            {"type": "python", "function": "test_masked_values:raises_with_the_row"},
            MASKS,
        ],
        sinks=[
            redis_sink(redis_url),
            redis_sink(redis_url, "second", stream="second", required=False),
            redis_sink("redis://127.0.0.1:1", "away", required=False),
        ],
    )
    with caplog.at_level(logging.DEBUG, "millstream"):
        run_once(spark, made)
    letters = entries(client, "acme:orders.dlq")
    assert len(entries(client)) == 4
    assert json.loads(entries(client)[-1]["key"]) == {"id": 5, "old": "***"}
    assert {letter["stage"] for letter in letters} == {"source", "processors[1]"}
    assert all(letter["masked"] == "yes" for letter in letters)
    queued = list(tmp_path.rglob("away/*/*.parquet"))
    rows = [value for file in queued for row in pq.read_table(file).to_pylist() for value in row.values()]
    assert len(entries(client, "second")) == sum("1.10" in str(value) for value in rows) + 3 == 4, "both were searched"
    assert CANARY not in repr(rows)
    held = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    for location in (everything(client, "out", "second", "acme:orders.dlq"), caplog.text, held):
        assert CANARY not in location
        assert TOKEN not in location
    assert "1.10" in everything(client, "out"), "what is not masked is there"


def test_masked_dead_letter_is_not_masked_again(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    put(client, [json.dumps({"id": 1, "email": CANARY})])
    spec: dict[str, Any] = {
        "source": {"type": "redis", "config": {"uri": redis_url, "streams": ["in"], "start": "earliest"}},
        "processors": [{"type": "mask", "fields": {"email": "hash"}}],
    }
    made = pipeline(tmp_path, **spec, sinks=[redis_sink(redis_url, stream="to.${after.where}")])
    run_once(spark, made)
    [letter] = entries(client, "acme:orders.dlq")
    corrected = pipeline(tmp_path, **spec, sinks=[redis_sink(redis_url)])
    assert replay_dead_letters(spark, make_plan(corrected)).delivered == 1
    [sent] = entries(client)
    assert json.loads(sent["event"])["after"] == json.loads(letter["payload"])["after"]
