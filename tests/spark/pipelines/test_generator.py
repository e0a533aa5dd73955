"""Row n is a pure function of the seed and n; and the rows of an order are consistent."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.sources.generator import FIELDS, GeneratorConfig, GeneratorSource

pytestmark = pytest.mark.spark


def events_of(spark: SparkSession, rows: int, *, seed: int = 42, parts: int = 1) -> list[dict[str, Any]]:
    source = GeneratorSource(type="generator", config=GeneratorConfig(seed=seed))
    numbers = spark.range(rows).repartition(parts).select(F.col("id").alias("n"), (F.col("id") + 5).alias("ts_ms"))
    made = [row.asDict() for row in source.to_events(numbers).collect()]
    return sorted(made, key=lambda row: int(row["id"].rpartition(":")[2]))


def test_same_seed_generates_the_same_rows(spark: SparkSession) -> None:
    assert events_of(spark, 200) == events_of(spark, 200, parts=3)
    assert events_of(spark, 200)[:50] == events_of(spark, 50)
    assert events_of(spark, 200) != events_of(spark, 200, seed=43)


def test_rows_equal_those_of_earlier_versions(spark: SparkSession) -> None:
    rows = events_of(spark, 2000)
    assert {row.pop("position") for row in rows} == {None}, "a column that earlier versions did not have"
    told_so_far = hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()
    assert told_so_far == "985a34c642d1cceed0b26ded53262477aa5b32052f81c355e983325ae9d2faf6"


def test_rows_are_created_changed_and_deleted_in_order(spark: SparkSession) -> None:
    rows = events_of(spark, 1000)
    assert {row["op"] for row in rows} == {"c", "u", "d"}
    assert len({row["id"] for row in rows}) == 1000
    states: dict[tuple[str, str], Any] = {}
    created: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        before, after = (json.loads(row[name]) if row[name] else None for name in ("before", "after"))
        assert (before is None) == (row["op"] == "c")
        assert (after is None) == (row["op"] == "d")
        for state in filter(None, (before, after)):
            assert set(state) == FIELDS[row["table"]]
            assert str(state["id"]) == row["key"]
        key = (row["table"], row["key"])
        if row["op"] == "c":
            assert row["key"] not in created[row["table"]]
            created[row["table"]].add(row["key"])
        elif row["key"] in created[row["table"]]:
            assert before == states[key]
        states[key] = after


def test_payment_matches_its_order(spark: SparkSession) -> None:
    rows = [(row["table"], json.loads(row["after"])) for row in events_of(spark, 500) if row["after"]]
    orders = {after["id"]: after for table, after in rows if table == "orders"}
    payments = [after for table, after in rows if table == "payments" and after["order_id"] in orders]
    assert payments
    assert all(payment["amount"] == orders[payment["order_id"]]["amount"] for payment in payments)
