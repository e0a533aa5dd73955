"""PostgreSQL to Redis through a pipeline: rows, then changes, exactly once, in commit order."""

from __future__ import annotations

import json
import os
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
        assert runner.named("shop").checkpoint.run_by() == os.getpid(), "`pipeline reset` must know that it runs"
        assert runner.wait(), runner.named("shop").error
    assert runner.named("shop").checkpoint.run_by() is None


def events(client: redis.Redis, stream: str = "changes.orders") -> list[dict[str, Any]]:
    return [json.loads(fields[b"event"]) for _, fields in client.xrange(stream)]


@pytest.fixture
def client(redis_server: RedisProcess) -> redis.Redis:
    return redis.Redis(port=redis_server.port)


def test_rows_and_changes_reach_redis_once_in_commit_order(
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


def test_debezium_envelope_has_its_fields_and_the_end_is_acknowledged(
    spark: SparkSession, postgres: PostgresDatabase, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'n' FROM generate_series(1, 9) i",
    )
    envelope = "envelope: {type: debezium, connector: postgresql}, fields: debezium"
    run_once(spark, postgres, redis_url, tmp_path, envelope=envelope)
    postgres.execute("UPDATE orders SET note = 'm' WHERE id < 4", "TRUNCATE orders")
    run_once(spark, postgres, redis_url, tmp_path, envelope=envelope)
    run_once(spark, postgres, redis_url, tmp_path, envelope=envelope)
    entries = [fields for _, fields in client.xrange("changes.orders")]
    assert len(entries) == 9 + 3 + 1
    assert all(set(fields) == {b"key", b"value", b"id"} for fields in entries)
    assert entries[0][b"key"] == b'{"id":1}'
    assert entries[-1][b"key"] == b"default"
    row, update = json.loads(entries[0][b"value"])["payload"], json.loads(entries[9][b"value"])["payload"]
    assert (row["op"], row["source"]["snapshot"], row["source"]["connector"]) == ("r", "true", "postgresql")
    assert "transaction" not in row
    _, lsn, _ = entries[9][b"id"].decode().split(":")
    assert (update["source"]["lsn"], update["transaction"]["total_order"]) == (int(lsn), 1)
    assert update["transaction"]["id"] == f"{update['source']['txId']}:{lsn}"
    [(confirmed,)] = postgres.execute("SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots")
    offsets = tmp_path / "checkpoint" / "spark" / "offsets"
    end = json.loads(
        (offsets / str(max(int(p.name) for p in offsets.iterdir() if p.name.isdigit()))).read_text().splitlines()[2]
    )
    assert confirmed == end["position"], "the end of the run is acknowledged"


def test_format_works_from_plain_pyspark(spark: SparkSession, postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    changes = (
        spark.readStream.format("postgres_changes")
        .option("dsn", postgres.dsn)
        .option("tables", "orders")
        .option("slot", f"alone_{postgres.name}")
        .option("publication", "alone")
        .option("create", "true")
        .option("segments", str(tmp_path / "segments"))
        .load()
    )
    rows: list[Any] = []
    query = (
        changes.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: rows.extend(frame.collect()))
        .start()
    )
    query.awaitTermination()
    assert [(row["op"], row["key"], row["table"]) for row in rows] == [
        ("r", '{"id":1}', "orders"),
        ("r", '{"id":2}', "orders"),
    ]
