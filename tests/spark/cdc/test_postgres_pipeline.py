"""Postgres to Redis through a whole pipeline: rows, then changes, exactly once, in the order of commits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from millstream.pipelines import Runner, parse_pipeline
from millstream.testing import PostgresDatabase, RedisProcess

pytestmark = pytest.mark.spark

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source:
    type: postgres
    config: {dsn: "DSN", tables: [orders], create: true, MORE}
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: "changes.${source.table}", ENVELOPE}}
  checkpoint: {path: CHECKPOINT}
"""


def run_once(
    spark: SparkSession, postgres: PostgresDatabase, url: str, path: Path, more: str = "", envelope: str = ""
) -> None:
    text = SPEC.replace("DSN", postgres.dsn).replace("URL", url).replace("CHECKPOINT", str(path / "checkpoint"))
    text = text.replace("MORE", more).replace("ENVELOPE", envelope)
    with Runner([parse_pipeline(text)], once=True, session=spark) as runner:
        assert runner.wait(), runner.named("shop").error


def events(client: redis.Redis, stream: str = "changes.orders") -> list[dict[str, Any]]:
    return [json.loads(fields[b"event"]) for _, fields in client.xrange(stream)]


@pytest.fixture
def client(redis_server: RedisProcess) -> redis.Redis:
    return redis.Redis(port=redis_server.port)


def test_rows_and_then_changes_reach_redis_once_and_in_the_order_of_commits(
    spark: SparkSession, postgres: PostgresDatabase, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text, price numeric(10,2))",
        "INSERT INTO orders VALUES (1, 'first', 9.90), (2, E'say \"hi\"\\n', NULL)",
    )
    run_once(spark, postgres, redis_url, tmp_path)
    rows = events(client)
    assert [(event["op"], event["after"]) for event in rows] == [
        ("r", {"id": 1, "note": "first", "price": "9.90"}),
        ("r", {"id": 2, "note": 'say "hi"\n', "price": None}),
    ]
    assert rows[0]["source"] == {"name": "shop", "db": postgres.name, "schema": "public", "table": "orders"}

    postgres.execute(
        "UPDATE orders SET price = 12 WHERE id = 1",
        "UPDATE orders SET id = 3 WHERE id = 2",
        "DELETE FROM orders WHERE id = 1",
        "TRUNCATE orders",
    )
    run_once(spark, postgres, redis_url, tmp_path)
    run_once(spark, postgres, redis_url, tmp_path)
    changes = events(client)[2:]
    assert [(event["op"], event["before"], event["after"]) for event in changes] == [
        ("u", None, {"id": 1, "note": "first", "price": "12.00"}),
        ("d", {"id": 2}, None),
        ("c", None, {"id": 3, "note": 'say "hi"\n', "price": None}),
        ("d", {"id": 1}, None),
        ("t", None, None),
    ]
    ids = [event["id"] for event in events(client)]
    assert len(set(ids)) == len(ids)
    keys = [fields.get(b"key") for _, fields in client.xrange("changes.orders")]
    assert keys == [b'{"id":1}', b'{"id":2}', b'{"id":1}', b'{"id":2}', b'{"id":3}', b'{"id":1}', None]
