"""One document as an event, form by form: the very text of its rows, or the reason why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.pipelines.envelope_reader import Understood, understand

ROW = '{"n": 1.10, "big":123456789012345678901234567890,"e":1e400}'


def test_rows_leave_byte_for_byte() -> None:
    assert understand(f" {ROW}\n", "auto").after == f" {ROW}\n"
    native = understand(f'{{"op":"u","before": {ROW} ,"after":{ROW},"ts_ms":7}}', "auto")
    assert (native.op, native.before, native.after, native.ts_ms) == ("u", ROW, ROW, 7)
    debezium = understand(
        f'{{"schema":null,"payload":{{"op":"r","after":{ROW},"source":{{"db":"d","table":"t"}}}}}}', "auto"
    )
    assert (debezium.op, debezium.after, debezium.db, debezium.table) == ("r", ROW, "d", "t")


@pytest.mark.parametrize("text", ['{"id":3}{"id":4}', '{"a":1}garbage', "{'a':1}", "[1]", '"a"', "", "{", '{"a":NaN}'])
@pytest.mark.parametrize("form", ["auto", "native", "debezium", "cloudevents", "row"])
def test_text_that_is_not_one_complete_object_is_refused(text: str, form: Any) -> None:
    result = understand(text, form)
    assert (result.error or "").startswith("this is no JSON object")
    assert result.after is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"op":"c","after":{},"ts_ms":"1700000000000"}', "ts_ms is no time"),
        ('{"op":"c","after":{},"ts_ms":1.5}', "ts_ms is no time"),
        ('{"op":"c","after":{},"ts_ms":-1}', "ts_ms is no time"),
        ('{"op":"c","after":[1]}', "after is no object"),
        ('{"op":"x","after":{}}', "unknown op x"),
        ('{"op":"u","before":null}', "neither before nor after"),
        ('{"after":{}}', "op is missing"),
    ],
)
def test_malformed_native_event_has_a_reason(text: str, why: str) -> None:
    assert why in (understand(text, "native").error or "")


def cloud(data: str, **others: str) -> Understood:
    """A CloudEvent of another producer, in the form of its specification."""
    attributes = {"id": "A234", "source": "/shop", "type": "com.shop.order.created", **others}
    head = ",".join(f'"{name}":"{value}"' for name, value in attributes.items())
    return understand(f'{{"specversion":"1.0",{head},"datacontenttype":"application/json","data":{data}}}', "auto")


@pytest.mark.parametrize(
    "data", ['{"op":"buy","n":1}', '{"source":"web"}', '{"op":"c","after":5}', '{"before":{}}', ROW]
)
def test_data_of_a_foreign_cloudevent_is_the_row(data: str) -> None:
    result = cloud(data)
    assert (result.op, result.after, result.before, result.error, result.id) == ("c", data, None, None, "A234")


@pytest.mark.parametrize(
    ("word", "op", "side"),
    [("created", "c", "after"), ("updated", "u", "after"), ("snapshot", "r", "after"), ("deleted", "d", "before")],
)
def test_op_decides_which_row_is_used(word: str, op: str, side: str) -> None:
    result = cloud('{"n":1}', type=f"com.shop.order.{word}")
    assert (result.op, getattr(result, side)) == (op, '{"n":1}')
    assert getattr(result, "before" if side == "after" else "after") is None


def test_truncate_has_no_row() -> None:
    result = cloud("null", type="com.shop.order.truncated")
    assert (result.op, result.before, result.after, result.error) == ("t", None, None, None)


@pytest.mark.parametrize(
    ("time", "ms"),
    [
        ("2024-03-10T02:30:00-05:00", 1_710_055_800_000),  # a local time that New York's clocks left out
        ("2024-03-31T02:30:00.25Z", 1_711_852_200_250),  # and Berlin's
        ("2018-04-05T17:31:00Z", 1_522_949_460_000),
        ("no time", None),
        ("1900-01-01T00:00:00Z", None),
    ],
)
def test_cloudevents_time_is_an_instant(time: str, ms: int | None) -> None:
    assert cloud("{}", time=time).ts_ms == ms


def test_empty_cloudevents_subject_is_omitted() -> None:
    assert cloud("{}", subject="").subject is None
    assert cloud("{}", subject="k").subject == "k"


@pytest.mark.parametrize("op", ['"op"', r'"o\u0070"', r'"\u006fp"'])
def test_change_with_escaped_names_is_recognized(op: str) -> None:
    assert understand(f'{{{op}:"d","before":{{"n":1}}}}', "auto").op == "d"
    assert understand(f'{{"payload":{{{op}:"u","after":{{"n":1}}}}}}', "auto").op == "u"


@pytest.mark.parametrize(
    "document",
    [
        {"id": 1, "op": "t", "source": {"shop": 7}},
        {"id": 1, "payload": {"op": "t", "amount": 5}},
        {"specversion": "1.0", "id": "1", "source": "/x", "type": "com.example.log.truncated", "data": {"id": 1}},
    ],
)
def test_row_that_resembles_a_truncate_is_not_lost(document: dict[str, Any]) -> None:
    result = understand(json.dumps(document), "auto")
    assert (result.op, result.error) == ("c", None)
    assert json.loads(result.after or "null") in (document, document.get("data"))


@pytest.mark.parametrize("form", ["native", "debezium", "auto"])
def test_truncate_is_recognised_by_its_source_and_its_sides(form: Any) -> None:
    change = {"op": "t", "before": None, "after": None, "source": {"table": "orders"}, "ts_ms": 5}
    for document in (change, {"payload": change}) if form != "native" else (change,):
        result = understand(json.dumps(document), form)
        assert (result.op, result.table, result.after, result.error) == ("t", "orders", None, None)


def test_empty_id_of_a_document_counts_as_missing() -> None:
    assert understand('{"id":"","op":"c","after":{}}', "native").id is None
    assert understand('{"id":"7","op":"c","after":{}}', "native").id == "7"
    assert understand('{"id":0,"op":"c","after":{}}', "native").id == "0"
    assert cloud("{}", id="").id is None
    assert cloud("{}", id="").error is None
