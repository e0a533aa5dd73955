"""Each processor over golden batches: the input, and the exact output."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow as pa
import pytest
from frames import event, events, processor, through
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.envelopes import Native
from millstream.pipelines.events import plain_columns, without_marks
from millstream.pipelines.processors import ProcessorStage
from millstream.pipelines.sources.generator import GeneratorSource

pytestmark = pytest.mark.spark

A = {"id": 1, "status": "paid", "amount": 120.5, "note": None, "tags": ["x"], "ok": True}
B = {"id": 2, "status": "new", "amount": 80, "text": "10"}


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"field": "after.status", "eq": "paid"}, [1]),
        ({"field": "after.status", "ne": "paid"}, [2, 3]),
        ({"field": "after.amount", "gt": 100}, [1]),
        ({"field": "after.amount", "gte": 80}, [1, 2]),
        ({"field": "after.amount", "lt": 100}, [2]),
        ({"field": "after.amount", "lte": 80.0}, [2]),
        ({"field": "after.amount", "eq": 80}, [2]),
        ({"field": "after.status", "in": ["paid", "gone"]}, [1]),
        ({"field": "after.id", "not_in": [1, 7]}, [2, 3]),
        ({"field": "after.status", "contains": "ai"}, [1]),
        ({"field": "after.status", "regex": "^n.w$"}, [2]),
        ({"field": "after.ok", "eq": True}, [1]),
        ({"field": "after.text", "eq": "10"}, [2]),
        ({"field": "after.note", "exists": True}, []),
        ({"field": "after.status", "exists": True}, [1, 2]),
        ({"field": "row.id", "not_exists": True}, []),
        ({"field": "after.status", "changed": True}, [1, 3]),
        ({"field": "op", "eq": "d"}, [3]),
        ({"field": "source.table", "eq": "orders"}, [1, 2, 3]),
        ({"field": "tenant_id", "eq": "acme"}, [1, 2, 3]),
    ],
)
def test_filter_by_predicate(spark: SparkSession, where: dict[str, Any], kept: list[int]) -> None:
    rows = [
        event(1, A, before=A | {"status": "new"}, op="u"),
        event(2, B, before=B, op="u"),
        event(3, None, before={"id": 3, "status": "x"}, op="d"),
    ]
    assert ids(through(spark, rows, type="filter", where={"all": [where]})) == [f"s:{n}" for n in kept]


def test_filter_by_op_table_and_any(spark: SparkSession) -> None:
    rows = [event(1, A), event(2, B, table="payments"), event(3, B, op="u"), event(4, A, db="other", table="orders")]
    assert ids(through(spark, rows, type="filter", ops=["c"], tables=["ord*"])) == ["s:1", "s:4"]
    assert ids(through(spark, rows, type="filter", tables=["shop.*"])) == ["s:1", "s:2", "s:3"]
    either = [{"field": "after.id", "eq": 1}, {"field": "op", "eq": "u"}]
    assert ids(through(spark, rows, type="filter", where={"any": either})) == ["s:1", "s:3", "s:4"]


def test_failed_event_passes_unchanged(spark: SparkSession) -> None:
    bad = event(9, A, error="why", stage="source", payload="text")
    for spec in (
        {"type": "filter", "ops": ["d"]},
        {"type": "select", "fields": ["x"]},
        {"type": "drop", "fields": ["id"]},
        {"type": "rename", "fields": {"id": "nr"}},
        {"type": "mask", "fields": {"id": "hash"}},
        {"type": "flatten"},
        {"type": "deduplicate", "keys": ["after.nothing"]},
        {"type": "route", "rules": [{"when": {"ops": ["d"]}, "stream": "s"}]},
        {"type": "sql", "query": "SELECT id, op, after FROM events WHERE false"},
        {"type": "python", "function": "test_processors:nothing"},
        {"type": "aggregate", "window": "1s", "measures": {"n": "count"}},
    ):
        [row] = through(spark, [bad], **spec)
        assert (row["error"], row["stage"], row["payload"], row["after"]) == ("why", "source", "text", A), spec


def test_select_drop_and_rename_keep_types_and_order(spark: SparkSession) -> None:
    exact = '{"id":1,"big":12345678901234567890.123456789,"note":null,"tags":[{"a":1}],"s":"1.50"}'
    [row] = events_text(spark, exact, type="select", fields=["s", "big", "note"])
    assert row == '{"big":12345678901234567890.123456789,"note":null,"s":"1.50"}'
    [row] = events_text(spark, exact, type="drop", fields=["big", "nothing"])
    assert row == '{"id":1,"note":null,"tags":[{"a":1}],"s":"1.50"}'
    [row] = events_text(spark, exact, type="rename", fields={"id": "nr", "s": "note", "nothing": "x"})
    assert row == '{"nr":1,"big":12345678901234567890.123456789,"tags":[{"a":1}],"note":"1.50"}'


def events_text(spark: SparkSession, after: str, **spec: Any) -> list[str]:
    frame = processor(**spec).apply(events(spark, [event(1, after, before=after)]), ProcessorStage("s"))
    rows = frame.collect()
    assert [row["before"] for row in rows] == [row["after"] for row in rows]
    return [row["after"] for row in rows]


def test_rename_can_swap(spark: SparkSession) -> None:
    [row] = through(spark, [event(1, {"a": 1, "b": 2})], type="rename", fields={"a": "b", "b": "a"})
    assert row["after"] == {"b": 1, "a": 2}


def test_flatten_lifts_objects_level_by_level(spark: SparkSession) -> None:
    nested = {"id": 1, "address": {"city": "Quito", "geo": {"lat": 1.5}}, "tags": [{"k": 1}], "none": {}, "null": None}
    [row] = through(spark, [event(1, nested)], type="flatten")
    assert row["after"] == {
        "id": 1,
        "address__city": "Quito",
        "address__geo__lat": 1.5,
        "tags": [{"k": 1}],
        "none": {},
        "null": None,
    }
    [row] = through(spark, [event(1, nested)], type="flatten", separator=".", max_depth=1)
    assert row["after"]["address.geo"] == {"lat": 1.5}


@pytest.mark.parametrize(("collision", "value"), [("last", 2), ("first", 1)])
def test_flatten_decides_collisions(spark: SparkSession, collision: str, value: int) -> None:
    [row] = through(spark, [event(1, {"a__b": 1, "a": {"b": 2}})], type="flatten", collision=collision)
    assert row["after"] == {"a__b": value}


def test_flatten_can_refuse_collisions(spark: SparkSession) -> None:
    rows = through(spark, [event(1, {"a__b": 1, "a": {"b": 2}}), event(2, A)], type="flatten", collision="error")
    assert "a__b" in rows[0]["error"]
    assert (rows[0]["stage"], rows[0]["after"]) == ("processors[0]", {"a__b": 1, "a": {"b": 2}})
    assert rows[1]["error"] is None


def test_mask_hides_and_keeps_equal_values_equal(spark: SparkSession) -> None:
    row = {"email": "a@b.c", "card": 4711, "name": "x", "none": None, "deep": {"a": 1}}
    spec = {"fields": {"email": "hash", "card": "hash", "name": "redact", "none": "hash", "deep": "redact"}}
    [masked] = through(spark, [event(1, row, before=row)], type="mask", salt="salz", **spec)
    digest = {text: hashlib.sha256(f"salz{text}".encode()).hexdigest() for text in ("a@b.c", "4711")}
    expected = {"email": digest["a@b.c"], "card": digest["4711"], "name": "***", "none": None, "deep": "***"}
    assert masked["after"] == masked["before"] == expected


def test_route_takes_the_first_rule_that_matches(spark: SparkSession) -> None:
    rows = [event(1, A), event(2, B, op="u"), event(3, None, before=B, op="d")]
    rules = [
        {"when": {"ops": ["d"]}, "stream": "gone.${source.table}"},
        {"when": {"ops": ["c"]}, "stream": "${tenant_id}.${after.status}"},
    ]
    routed = through(spark, rows, type="route", rules=rules)
    assert [row["stream"] for row in routed] == ["acme.paid", None, "gone.orders"]
    assert [row["error"] for row in routed] == [None, None, None]
    routed = through(spark, rows, type="route", rules=rules, default="x.${after.status}")
    assert [row["stream"] for row in routed] == ["acme.paid", "x.new", "gone.orders"]
    routed = through(spark, rows, type="route", rules=rules[:1], default="x.${after.status}.${after.text}")
    assert [row["error"] is None for row in routed] == [False, True, True]


def test_deduplicate_by_keys(spark: SparkSession) -> None:
    rows = [event(1, A), event(2, A), event(3, B), event(4, {"x": 1}), event(5, {"x": 2})]
    stored = through(spark, rows, type="deduplicate", keys=["after.id", "after.status"])
    assert [row["after"] for row in stored if row["error"] is None] == [A, B]
    assert [row["error"] for row in stored if row["error"]] == ["deduplicate: after.id is missing"] * 2


def test_aggregate_counts_windows(spark: SparkSession) -> None:
    rows = [event(n, {"id": n, "city": "xy"[n % 2], "amount": n}, ts_ms=1000 * n) for n in range(1, 6)]
    spec = {"window": "4s", "group_by": ["source.table", "after.city"]}
    measures = {"n": "count", "total": "sum(after.amount)", "top": "max(after.amount)"}
    made = through(spark, rows, type="aggregate", id="revenue", measures=measures, **spec)
    assert [row["after"] for row in sorted(made, key=lambda row: (row["ts_ms"], row["after"]["city"]))] == [
        {"window_start": 0, "window_end": 4000, "table": "orders", "city": "x", "n": 1, "total": 2.0, "top": 2.0},
        {"window_start": 0, "window_end": 4000, "table": "orders", "city": "y", "n": 2, "total": 4.0, "top": 3.0},
        {"window_start": 4000, "window_end": 8000, "table": "orders", "city": "x", "n": 1, "total": 4.0, "top": 4.0},
        {"window_start": 4000, "window_end": 8000, "table": "orders", "city": "y", "n": 1, "total": 5.0, "top": 5.0},
    ]
    assert {(row["table"], row["op"]) for row in made} == {("revenue", "c")}
    again = through(spark, reversed(rows), type="aggregate", id="revenue", measures=measures, **spec)
    assert ids(again) == ids(made)
    assert len(set(ids(made))) == 4


def test_sql_sees_variants_or_the_schema(spark: SparkSession) -> None:
    rows = [event(1, A), event(2, B)]
    query = "SELECT id, op, `table`, after:status::string AS status, after:amount * 2 AS twice FROM events"
    made = through(spark, rows, type="sql", query=query.replace("after:amount", "after:amount::double"))
    assert [(row["id"], row["after"]) for row in made] == [
        ("s:1", {"status": "paid", "twice": 241.0}),
        ("s:2", {"status": "new", "twice": 160.0}),
    ]
    query = "SELECT id, op, after FROM events WHERE after.amount > 100"
    [row] = through(spark, rows, type="sql", query=query, schema="id BIGINT, amount DOUBLE")
    assert row["after"] == {"id": 1, "amount": 120.5}


def test_sql_gives_ids_that_a_replay_gives_again(spark: SparkSession) -> None:
    rows = [event(n, {"c": "xy"[n % 2]}) for n in range(4)]
    grouped = {"type": "sql", "query": "SELECT after:c::string AS c, count(*) AS n FROM events GROUP BY 1"}
    first, again = through(spark, rows, **grouped), through(spark, reversed(rows), **grouped)
    assert ids(first) == ids(again)
    assert len(set(ids(first))) == 2
    assert all(row["id"].startswith("acme::processors[0]:7:") for row in first)
    doubled = {"type": "sql", "query": "SELECT id, op, after FROM events LATERAL VIEW explode(array(1, 2)) t AS n"}
    assert ids(through(spark, rows[:1], **doubled)) == ["s:0", "s:0.1"]


def test_sql_that_returns_no_row_object_is_a_dead_letter(spark: SparkSession) -> None:
    spec = processor(type="sql", query="SELECT id, op, 'nope' AS after FROM events")
    [row] = spec.apply(events(spark, [event(1, A)]), ProcessorStage("s")).collect()
    assert (row["error"], row["stage"], row["after"]) == ("after is no JSON object", "s", "nope")


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    after = [json.dumps({"twice": json.loads(text)["id"] * 2}) for text in batch.column("after").to_pylist()]
    return batch.set_column(batch.schema.get_field_index("after"), "after", pa.array(after))


def nothing(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(0, 0)


def repeated(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array([*range(batch.num_rows)] * 2))


def test_python_over_arrow_batches(spark: SparkSession) -> None:
    made = through(spark, [event(1, A), event(2, B)], type="python", function="test_processors:doubled")
    assert [row["after"] for row in made] == [{"twice": 2}, {"twice": 4}]
    assert through(spark, [event(1, A)], type="python", function="test_processors:nothing") == []
    assert ids(through(spark, [event(1, A)], type="python", function="test_processors:repeated")) == ["s:1", "s:1.1"]


def test_python_dead_letters_only_the_row_that_fails(spark: SparkSession) -> None:
    rows = [event(n, {"id": n} if n != 5 else {"no": n}) for n in range(9)]
    made = through(spark, rows, type="python", function="test_processors:doubled")
    assert [row["after"] for row in made if row["error"] is None] == [{"twice": 2 * n} for n in range(9) if n != 5]
    [bad] = [row for row in made if row["error"]]
    assert (bad["id"], bad["error"], bad["after"]) == ("s:5", "python: KeyError: 'id'", {"no": 5})


def generated(spark: SparkSession) -> DataFrame:
    """Events whose source promises that id, key, name, db, table and op need no escaping."""
    numbers = spark.range(4).select(F.col("id").alias("n"), F.col("id").alias("ts_ms"))
    return GeneratorSource(type="generator").to_events(numbers)


def hostile(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Quotes where there were none, and a null where there was none."""
    ids = pa.array([f'{text}"' for text in batch.column("id").to_pylist()])
    return pa.RecordBatch.from_arrays(
        [ids, pa.array(['ta"ble'] * batch.num_rows), batch.column("op"), batch.column("after")],
        names=["id", "table", "op", "after"],
    )


HOSTILE = """SELECT concat(id, '"') AS id, 'ta"ble' AS table, op, after FROM events"""


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "python", "function": "test_processors:hostile"},
        {"type": "sql", "query": HOSTILE},
        {"type": "sql", "query": f"SELECT id, table, op, after FROM events WHERE op = 'x' UNION ALL {HOSTILE}"},
    ],
)
def test_plain_mark_does_not_apply_to_user_code(spark: SparkSession, spec: dict[str, Any]) -> None:
    made = processor(**spec).apply(generated(spark), ProcessorStage("s", failures_before=False))
    assert not plain_columns(made)
    documents = [json.loads(row["event"]) for row in made.select(Native().column(made).alias("event")).collect()]
    assert sorted(document["id"] for document in documents) == [f'generator-42:{n}"' for n in range(4)]
    assert [document["source"] for document in documents] == [{"table": 'ta"ble'}] * 4


def test_plain_mark_is_lost_when_a_column_is_replaced(spark: SparkSession) -> None:
    promised = {"id", "key", "name", "db", "table", "op"}
    reported = generated(spark)
    for spec in (
        {"type": "filter", "ops": ["c"]},
        {"type": "rename", "fields": {"id": "number"}},
        {"type": "drop", "fields": ["id"]},
    ):
        assert plain_columns(processor(**spec).apply(reported, ProcessorStage("s"))) == promised, spec
    assert plain_columns(reported.withColumn("id", F.concat("id", F.lit('"')))) == promised - {"id"}
    assert plain_columns(without_marks(reported)) == frozenset()


def test_unchanged_values_keep_every_byte(spark: SparkSession) -> None:
    exact = '{"a": 1.10,"b":123456789012345678901234567890123456789012,"c":1e400,"d":-0.0,"s":"\\u00e9"}'
    for spec in (
        {"type": "drop", "fields": ["nothing"]},
        {"type": "select", "fields": ["a", "b", "c", "d", "s"]},
        {"type": "rename", "fields": {"nothing": "x"}},
        {"type": "mask", "fields": {"no.thing": "hash"}},
        {"type": "flatten"},
    ):
        assert events_text(spark, exact, **spec) == [exact], spec
    [row] = events_text(spark, exact, type="mask", fields={"s": "redact"})
    assert row == '{"a":1.10,"b":123456789012345678901234567890123456789012,"c":1e400,"d":-0.0,"s":"***"}'


def test_globs_end_where_the_name_ends_and_know_schemas(spark: SparkSession) -> None:
    rows = [event(1, A, table="orders\n"), event(2, A, table="orders", schema="public"), event(3, A, db="x")]
    assert ids(through(spark, rows, type="filter", tables=["orders"])) == ["s:2", "s:3"]
    assert ids(through(spark, rows, type="filter", tables=["public.ord*"])) == ["s:2"]
    assert ids(through(spark, rows, type="filter", tables=["shop.public.orders"])) == ["s:2"]


def test_groups_and_keys_keep_their_types(spark: SparkSession) -> None:
    rows = [event(n, {"k": key, "n": 2}) for n, key in enumerate([1, "1", 1.0, None, "x"])]
    made = through(
        spark, rows, type="aggregate", window="1h", group_by=["after.k"], measures={"n": "count", "s": "sum(after.n)"}
    )
    assert sorted((json.dumps(row["after"]["k"]), row["after"]["n"], row["after"]["s"]) for row in made) == [
        ('"1"', 1, 2.0),
        ('"x"', 1, 2.0),
        ("1", 2, 4.0),
        ("null", 1, 2.0),
    ]
    stored = through(spark, rows[:3], type="deduplicate", keys=["after.k"])
    assert sorted(json.dumps(row["after"]["k"]) for row in stored) in (['"1"', "1"], ['"1"', "1.0"])


def test_aggregate_ignores_text(spark: SparkSession) -> None:
    rows = [event(n, {"n": value}) for n, value in enumerate([1, "5", "NaN", True])]
    [made] = through(spark, rows, type="aggregate", window="1h", measures={"s": "sum(after.n)", "m": "max(after.n)"})
    assert (made["after"]["s"], made["after"]["m"]) == (1.0, 1.0)
