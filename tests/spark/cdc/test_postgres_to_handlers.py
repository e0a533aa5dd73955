"""PostgreSQL to typed handlers: rows and changes go through a pipeline into Redis, and a router handles them."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pyspark.sql import SparkSession

from millstream import ChangeEvent, Router, open_broker
from millstream.messaging import DeadLetters
from millstream.pipelines import Runner, parse_pipeline
from millstream.testing import PostgresDatabase, eventually

pytestmark = pytest.mark.spark

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source:
    type: postgres
    config: {dsn: "DSN", tables: [orders], create: true}
  sinks:
    - {type: redis, config: {id: a, uri: "URL", stream: "native.${source.table}"}}
    - {type: redis, config: {id: b, uri: "URL", stream: "debezium.orders", envelope: debezium, fields: debezium}}
    - {type: redis, config: {id: c, uri: "URL", stream: "raw.${source.table}", envelope: raw}}
    - {type: redis, config: {id: d, uri: "URL", stream: "cloud.orders", envelope: cloudevents, fields: debezium}}
  checkpoint: {path: CHECKPOINT}
"""
PREFIXES = ("native", "debezium", "raw", "cloud")


class Order(BaseModel):
    id: int
    note: str
    price: Decimal | None


def run_once(spark: SparkSession, postgres: PostgresDatabase, url: str, path: Path) -> None:
    text = SPEC.replace("DSN", postgres.dsn).replace("URL", url).replace("CHECKPOINT", str(path / "checkpoint"))
    with Runner([parse_pipeline(text)], once=True, session=spark) as runner:
        assert runner.wait(), runner.named("shop").error


def test_typed_handlers_receive_every_row_and_change(
    spark: SparkSession, postgres: PostgresDatabase, redis_url: str, tmp_path: Path
) -> None:
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text, price numeric(10,2))",
        "INSERT INTO orders VALUES (1, 'first', 9.90), (2, E'say \"hi\"\\n', NULL)",
    )
    run_once(spark, postgres, redis_url, tmp_path)
    postgres.execute("UPDATE orders SET price = 12 WHERE id = 1", "DELETE FROM orders WHERE id = 2", "TRUNCATE orders")
    run_once(spark, postgres, redis_url, tmp_path)
    rows, changes, reasons = asyncio.run(handled(redis_url))
    for prefix in PREFIXES:
        assert rows[prefix] == [
            Order(id=1, note="first", price=Decimal("9.90")),
            Order(id=2, note='say "hi"\n', price=None),
            Order(id=1, note="first", price=Decimal("12.00")),
        ]
        # PostgreSQL logs no more than the key of an old row: there is no complete row before the delete.
        assert [(event.op, event.key.get("id"), event.before) for event in changes[prefix]] == [
            ("r", 1, None),
            ("r", 2, None),
            ("u", 1, None),
            ("d", 2, None),
            ("t", None, None),
        ]
        assert [event.after for event in changes[prefix]] == [*rows[prefix], None, None]
        assert {event.source.table for event in changes[prefix]} == {"orders"}
        assert len({event.id for event in changes[prefix]}) == 5
        assert len(reasons[prefix]) == 2
        assert all("ChangeEvent[Order]" in reason for reason in reasons[prefix])
    assert {event.source.db for event in changes["native"]} == {postgres.name}


async def handled(url: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[str, list[str]]]:
    """The rows and the changes that handlers received, and the reasons of dead letters, by stream."""
    rows: dict[str, list[Any]] = {prefix: [] for prefix in PREFIXES}
    changes: dict[str, list[Any]] = {prefix: [] for prefix in PREFIXES}
    async with open_broker(url) as broker:
        router = Router(broker, group_start="0")
        for prefix in PREFIXES:

            async def take_row(order: Order, into: list[Any] = rows[prefix]) -> None:
                into.append(order)

            async def take_change(event: ChangeEvent[Order], into: list[Any] = changes[prefix]) -> None:
                into.append(event)

            router.add(take_row, f"{prefix}.orders", group="rows", max_in_flight=1)
            router.add(take_change, f"{prefix}.orders", group="changes", max_in_flight=1)
        letters = {prefix: DeadLetters(broker, f"{prefix}.orders") for prefix in PREFIXES}

        async def all_settled() -> bool:
            counts = [await each.count() for each in letters.values()]
            return counts == [2] * len(PREFIXES) and all(len(changes[prefix]) == 5 for prefix in PREFIXES)

        async with router:
            await eventually(all_settled, what="all entries to be handled or dead-lettered")
        events = {prefix: await each.list() for prefix, each in letters.items()}
    return (
        rows,
        changes,
        {prefix: [event.details.error for event in each if event.details] for prefix, each in events.items()},
    )
