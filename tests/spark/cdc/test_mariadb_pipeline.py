"""MariaDB to Redis through a pipeline: rows, then changes, exactly once, in commit order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millstream.cli.main import build
from millstream.pipelines import Runner, parse_pipeline
from millstream.testing import MariadbDatabase, RedisProcess

pytestmark = pytest.mark.spark

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: mariadb, config: {dsn: "DSN", tables: [orders]}}
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: "changes.${source.table}"}}
  checkpoint: {path: CHECKPOINT}
"""


def test_rows_and_changes_reach_redis_once_in_commit_order(
    spark: SparkSession, mariadb: MariadbDatabase, redis_url: str, redis_server: RedisProcess, tmp_path: Path
) -> None:
    mariadb.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text, price decimal(10,2))",
        "INSERT INTO orders VALUES (1, 'first', 9.90), (2, 'say \"hi\"\\n', NULL)",
    )
    text = SPEC.replace("DSN", mariadb.dsn).replace("URL", redis_url)
    text = text.replace("CHECKPOINT", str(tmp_path / "checkpoint"))
    client = redis.Redis(port=redis_server.port)

    def run_once() -> list[dict]:
        with Runner([parse_pipeline(text)], once=True, session=spark) as runner:
            assert runner.wait(), runner.named("shop").error
        return [json.loads(fields[b"event"]) for _, fields in client.xrange("changes.orders")]

    rows = run_once()
    assert [(event["op"], event["after"]) for event in rows] == [
        ("r", {"id": 1, "note": "first", "price": "9.90"}),
        ("r", {"id": 2, "note": 'say "hi"\n', "price": None}),
    ]
    assert rows[0]["source"] == {"name": "shop", "db": mariadb.name, "table": "orders"}
    mariadb.execute(
        "UPDATE orders SET price = 12 WHERE id = 1",
        "UPDATE orders SET id = 3 WHERE id = 2",
        "DELETE FROM orders WHERE id = 1",
        "TRUNCATE orders",
    )
    run_once()
    changes = run_once()[2:]
    first = {"id": 1, "note": "first", "price": "9.90"}
    dearer = {**first, "price": "12.00"}
    second = {"id": 2, "note": 'say "hi"\n', "price": None}
    assert [(event["op"], event["before"], event["after"]) for event in changes] == [
        ("u", first, dearer),
        ("d", second, None),
        ("c", None, {**second, "id": 3}),
        ("d", dearer, None),
        ("t", None, None),
    ]
    ids = [event["id"] for event in rows + changes]
    assert len(set(ids)) == len(ids)
    keys = [fields.get(b"key") for _, fields in client.xrange("changes.orders")]
    assert keys == [b'{"id":1}', b'{"id":2}', b'{"id":1}', b'{"id":2}', b'{"id":3}', b'{"id":1}', None]

    spec = tmp_path / "shop.yaml"
    spec.write_text(text)
    looked = CliRunner().invoke(build(["doctor"]), ["doctor", str(spec)])
    assert looked.exit_code == 0, looked.output
    assert "0 bytes after the checkpoint" in " ".join(looked.output.split())
    mariadb.execute("INSERT INTO orders VALUES (9, 'x', 1)", "FLUSH BINARY LOGS")
    mariadb.purge_logs()
    looked = CliRunner().invoke(build(["doctor"]), ["doctor", str(spec)])
    assert looked.exit_code != 0
    assert "it was purged" in " ".join(looked.output.split())


def test_format_works_from_plain_pyspark(spark: SparkSession, mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    changes = (
        spark.readStream.format("mariadb_changes")
        .option("dsn", mariadb.dsn)
        .option("tables", "orders")
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
