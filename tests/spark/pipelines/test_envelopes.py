"""Every envelope with every op, written and read again; and documents of other producers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from frames import collected, event, events
from pydantic import TypeAdapter
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.envelopes import AnyEnvelope, Envelope
from millstream.pipelines.sinks.redis import RedisSink

pytestmark = pytest.mark.spark

ROW = {"id": 1, "name": 'quo"te\\ \n \x01 é 😀', "big": 12345678901234567890.5, "none": None}
EVENTS = [
    event(1, ROW, op="c", key="1"),
    event(2, ROW, before=ROW, op="u"),
    event(3, None, before=ROW, op="d"),
    event(4, ROW, op="r", db=None, schema="public"),
    event(5, None, op="t"),
    event(6, ROW, op="c", id='odd"id\\', table='ta"ble', ts_ms=None),
]
_ENVELOPE: TypeAdapter[Envelope] = TypeAdapter(AnyEnvelope)


def written(spark: SparkSession, envelope: Any, rows: list[dict[str, Any]]) -> list[Any]:
    return [json.loads(text) for text in texts(spark, envelope, rows)]


def texts(spark: SparkSession, envelope: Any, rows: list[dict[str, Any]]) -> list[str]:
    frame = events(spark, rows)
    made = frame.select(_ENVELOPE.validate_python(envelope).column(frame).alias("event")).collect()
    return [row["event"] for row in made]


def read(
    spark: SparkSession, documents: list[Any], form: Format = "auto", *, own_ids: bool = False
) -> list[dict[str, Any]]:
    texts = [text if isinstance(text, str | None) else json.dumps(text) for text in documents]
    frame = spark.createDataFrame([(f"p:{n}", text) for n, text in enumerate(texts)], "at string, text string")
    position = SourcePosition(id=F.col("at"), ts_ms=F.lit(77), name=F.lit("in"), table=F.lit("t"))
    return collected(read_documents(frame, F.col("text"), position, form, own_ids=own_ids))


def test_native(spark: SparkSession) -> None:
    native = written(spark, "native", EVENTS)
    assert native[0] == {
        "id": "s:1",
        "op": "c",
        "ts_ms": 1001,
        "source": {"name": "s", "db": "shop", "table": "orders"},
        "before": None,
        "after": ROW,
    }
    assert [item["op"] for item in native] == ["c", "u", "d", "r", "t", "c"]
    assert (native[5]["id"], native[5]["source"]["table"], native[5]["ts_ms"]) == ('odd"id\\', 'ta"ble', None)
    assert native[3]["source"] == {"name": "s", "schema": "public", "table": "orders"}


def test_a_member_that_is_null_leaves_no_comma_behind(spark: SparkSession) -> None:
    names = ("name", "db", "schema", "table")
    options = [dict(zip(names, values, strict=True)) for values in itertools.product((None, 'a"b'), repeat=len(names))]
    for text, source in zip(texts(spark, "native", [event(1, {}, **each) for each in options]), options, strict=True):
        output = json.dumps({name: value for name, value in source.items() if value is not None}, separators=(",", ":"))
        assert text == f'{{"id":"s:1","op":"c","ts_ms":1001,"source":{output},"before":null,"after":{{}}}}'


def test_any_id_survives_the_round_trip(spark: SparkSession) -> None:
    hostile = ['"', "\\", "\x00", "\x1f\n\t", "\x7f", "\u2028", "é😀", "", 'a"b\\"c', "\\u0041", "\\"]
    for envelope in ("native", "cloudevents"):
        made = written(spark, envelope, [event(1, {}, id=each, table=each or None) for each in hostile])
        assert [item["id"] for item in made] == hostile


def test_headers_can_hold_any_text(spark: SparkSession) -> None:
    config = {
        "id": "r",
        "uri": "redis://localhost",
        "stream": "s",
        "headers": {"key": "${key}", "where": "${source.db}"},
    }
    sink = RedisSink.model_validate({"type": "redis", "config": config})
    rows = [event(1, {}, table='ta"ble', key="k\n"), event(2, {}, table=None, db=None), event(3, {}, op=None)]
    made = [json.loads(row["headers"]) for row in sink.prepare(events(spark, rows), "").collect()]
    kind = {"content-type": "application/json"}
    assert [{name: value for name, value in item.items() if value} for item in made] == [
        {**kind, "table": 'ta"ble', "op": "c", "key": "k\n", "where": "shop"},
        {**kind, "op": "c"},
        {**kind, "table": "orders", "where": "shop"},
    ]


def test_debezium(spark: SparkSession) -> None:
    plain, with_schema = (
        written(spark, envelope, EVENTS)[1] for envelope in ("debezium", {"type": "debezium", "null_schema": True})
    )
    assert set(plain) == {"payload"}
    assert plain["payload"]["before"] == plain["payload"]["after"] == ROW
    assert plain["payload"]["source"]["table"] == "orders"
    assert {"connector", "name", "ts_ms", "db", "schema", "table"} <= set(plain["payload"]["source"])
    assert (plain["payload"]["op"], plain["payload"]["ts_ms"]) == ("u", 1002)
    assert with_schema == {"schema": None, **plain}


def test_cloudevents(spark: SparkSession) -> None:
    made = written(spark, {"type": "cloudevents", "type_prefix": "com.acme"}, EVENTS)
    kinds = [item["type"] for item in made[:5]]
    assert kinds == [f"com.acme.orders.{item}" for item in ("created", "updated", "deleted", "snapshot", "truncated")]
    first = made[0]
    assert (first["specversion"], first["id"], first["source"], first["subject"]) == (
        "1.0",
        "s:1",
        "/s/shop/orders",
        "1",
    )
    assert (first["time"], first["datacontenttype"]) == ("1970-01-01T00:00:01.001Z", "application/json")
    assert first["data"] == {"op": "c", "ts_ms": 1001, "before": None, "after": ROW}
    assert "time" not in made[5]
    assert "subject" not in made[1]
    assert made[5]["source"] == "/s/shop/ta%22ble"


def test_raw_bypasses_the_envelope(spark: SparkSession) -> None:
    assert written(spark, "raw", EVENTS[:5]) == [ROW, ROW, ROW, ROW, None]


@pytest.mark.parametrize("envelope", ["native", "debezium", {"type": "debezium", "null_schema": True}, "cloudevents"])
def test_written_envelopes_can_be_read(spark: SparkSession, envelope: Any) -> None:
    documents = written(spark, envelope, EVENTS[:5])
    for form in ("auto", envelope["type"] if isinstance(envelope, dict) else envelope):
        back = read(spark, documents, form)
        assert [row["error"] for row in back] == [None] * 5
        for name in ("op", "ts_ms", "before", "after"):
            values = [json.loads(e[name]) if name in ("before", "after") and e[name] else e[name] for e in EVENTS[:5]]
            assert [row[name] for row in back] == values, name
        assert [row["id"] for row in back] == [f"p:{n}" for n in range(5)]


def test_own_ids_are_used_on_request(spark: SparkSession) -> None:
    documents = [*written(spark, "native", EVENTS[:2]), {"op": "c", "after": {"a": 1}}]
    assert [row["id"] for row in read(spark, documents, own_ids=True)] == ["p:2", "s:1", "s:2"]


def test_documents_of_other_producers(spark: SparkSession) -> None:
    documents: list[Any] = [
        {
            "before": None,
            "after": {"a": 1},
            "source": {"table": "x", "db": "d"},
            "op": "r",
            "ts_ms": 5,
            "transaction": None,
        },
        {"specversion": "1.0", "id": "9", "source": "/else", "type": "com.other.thing.deleted", "data": {"a": 2}},
        {"anything": {"op": "c"}, "payload": "text"},
        {
            "specversion": "1.0",
            "id": "9",
            "source": "/x",
            "type": "t",
            "time": "1970-01-01T00:00:02Z",
            "data": {"b": 1},
        },
    ]
    rows = read(spark, documents)
    assert [row["error"] for row in rows] == [None] * 4
    assert [(row["op"], row["after"], row["ts_ms"]) for row in rows] == [
        ("r", {"a": 1}, 5),
        ("d", None, 77),
        ("c", documents[2], 77),
        ("c", {"b": 1}, 2000),
    ]
    assert rows[1]["before"] == {"a": 2}, "what was deleted is the row before"
    assert (rows[0]["table"], rows[0]["db"], rows[0]["name"]) == ("x", "d", "in")
    assert (rows[2]["table"], rows[2]["name"]) == ("t", "in")


@pytest.mark.parametrize(
    ("text", "form", "why"),
    [
        ("no json", "auto", "no JSON object"),
        ('["a"]', "auto", "no JSON object"),
        ('"text"', "auto", "no JSON object"),
        ("", "auto", "no JSON object"),
        (None, "auto", "no such field"),
        ('{"op":"c","after":"text"}', "native", "after is no object"),
        ('{"payload":{"op":"x","after":{}}}', "debezium", "unknown op x"),
        ('{"op":"c"}', "native", "neither before nor after"),
        ('{"after":{"a":1}}', "native", "op is missing"),
        ('{"data":{"a":1}}', "cloudevents", "specversion"),
        ('{"op":"c","after":{"a":1},"ts_ms":9000000000000000000}', "auto", "ts_ms is no time"),
    ],
)
def test_unreadable_document_keeps_its_text_with_a_reason(
    spark: SparkSession, text: str | None, form: Format, why: str
) -> None:
    [row] = read(spark, [text], form)
    assert why in row["error"]
    assert (row["payload"], row["stage"], row["id"]) == (text, "source", "p:0")


def test_invalid_time_is_replaced_by_the_time_of_the_entry(spark: SparkSession) -> None:
    document = {"specversion": "1.0", "id": "9", "source": "/x", "type": "t", "time": "yesterday", "data": {"b": 1}}
    [row] = read(spark, [document])
    assert (row["error"], row["ts_ms"]) == (None, 77)
