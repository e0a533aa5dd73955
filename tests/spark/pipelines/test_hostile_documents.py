"""Processors and envelopes over documents of unusual shape: the right result, or a dead letter of the right stage."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from frames import event, events, processor
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.envelope_reader import understand
from millstream.pipelines.envelopes import CloudEvents, Debezium, Envelope, Native, Raw
from millstream.pipelines.json_text import canonical, parse
from millstream.pipelines.processors import ProcessorStage

pytestmark = pytest.mark.spark

DOCUMENTS = {
    "plain": '{"id":1,"k":"x","n":1.10,"a":{"b":1}}',
    "190 levels": '{"id":1,"k":"x","d":' + '{"a":' * 189 + "1" + "}" * 190,
    "two members of one name": '{"id":1,"k":"x","k":"y"}',
    "two nested members of one name": '{"id":1,"k":"x","a":{"b":1,"b":2}}',
    "half of a surrogate pair": '{"id":1,"k":"\\ud800"}',
    "half of a surrogate pair in a name": '{"id":1,"k":"x","\\ud800":{"b":1}}',
    "NUL": '{"id":1,"k":"a\\u0000b","\\u0000":1}',
    "beyond doubles": '{"id":1,"k":"x","n":1e400}',
    "beyond decimals": '{"id":1,"k":"x","n":1e99999999999999999999}',
    "large exponent": '{"id":1,"k":"x","n":1e999999999}',
    "50 digits": '{"id":1,"k":"x","n":' + "9" * 50 + "}",
    "empty names": '{"id":1,"k":"x","":1,"a":{"":2}}',
    "dots in names": '{"id":1,"k":"x","a.b":{"c.d":3},"a":{"b.c":1}}',
    "braces": '{"id":1,"k":"a}b{c","{x}":{"}":3}}',
    "empty text": '{"id":1,"k":""}',
    "quotes": '{"id":1,"k":"\\"\\\\","a\\"b":{"c\\\\":1}}',
    "lists": '{"id":1,"k":[1,"x",{"b":[]}],"a":[{"b":1},{"b":2}]}',
    "nulls": '{"id":1,"k":null,"n":null}',
    "unusual characters": '{"id":1,"k":"\u2028\U0001f600\ufeff"}',
    "empty object": "{}",
    "2 MB": '{"id":1,"k":"' + "x" * (2 << 20) + '"}',
    "many members": '{"id":1,"k":"x",' + ",".join(f'"f{number}":{number}' for number in range(5_000)) + "}",
}
NAMES = list(DOCUMENTS)
STAGE = ProcessorStage("processors[0]", tenant="acme", batch_id=7)


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.mark.parametrize(
    ("spec", "keeps_rows"),
    [
        ({"type": "select", "fields": ["id", "k", "a.b"]}, False),
        ({"type": "drop", "fields": ["a.b", "id"]}, False),
        ({"type": "rename", "fields": {"k": "q", "a.b": "c"}}, False),
        ({"type": "mask", "fields": {"k": "hash", "a.b": "redact"}}, False),
        ({"type": "flatten", "collision": "error", "separator": "_"}, False),
        ({"type": "deduplicate", "keys": ["after.k", "id"]}, True),
        ({"type": "sql", "query": "SELECT id, after FROM events"}, True),
        ({"type": "sql", "query": "SELECT id, after FROM events", "schema": "k STRING, n DOUBLE"}, False),
        ({"type": "python", "function": "test_hostile_documents:unchanged"}, True),
        ({"type": "route", "rules": [], "default": "s.${row.k}"}, True),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_processor_gives_a_result_or_a_dead_letter(spark: SparkSession, spec: dict[str, Any], keeps_rows: bool) -> None:
    if spec["type"] == "route":
        spec = spec | {"rules": [{"when": {"where": {"all": [{"field": "after.n", "gt": 1}]}}, "stream": "s.${row.n}"}]}
    frame = events(spark, [event(number, DOCUMENTS[name]) for number, name in enumerate(NAMES)])
    rows = processor(**spec).apply(frame.withColumn("event_time", F.timestamp_millis("ts_ms")), STAGE).collect()
    assert sorted(row["id"] for row in rows) == sorted(f"s:{number}" for number in range(len(NAMES)))
    for row in rows:
        document = DOCUMENTS[NAMES[int(row["id"][2:])]]
        if row["error"] is not None:
            assert row["stage"] == "processors[0]"
            assert row["after"] == document, "a dead letter holds the event as it was in front of the stage"
            continue
        value = parse(row["after"])
        assert "Infinity" not in row["after"]
        if keeps_rows:
            assert canonical(value) == canonical(parse(document))


@pytest.mark.parametrize(
    ("envelope", "form"),
    [
        (Native(), "native"),
        (Debezium(type="debezium"), "debezium"),
        (CloudEvents(type="cloudevents"), "cloudevents"),
        (Raw(type="raw"), "row"),
    ],
    ids=["native", "debezium", "cloudevents", "raw"],
)
def test_envelope_is_read_back_as_it_was_written(spark: SparkSession, envelope: Envelope, form: Any) -> None:
    texts = ['a"b', "\x00", "x\u2028", "{}", "", "\\", "a}b", "é"]
    rows = []
    for number, name in enumerate(NAMES):
        key, table, db = (texts[(number + more) % len(texts)] for more in range(3))
        rows.append(event(number, DOCUMENTS[name], key=key, table=table, db=db))
    frame = events(spark, rows)
    for written in frame.select("id", envelope.column(frame).alias("document")).collect():
        row = rows[int(written["id"][2:])]
        for each in (form, "auto"):
            result = understand(written["document"], each)
            assert (result.error, result.op, result.after) == (None, "c", row["after"])
            if form in ("native", "debezium"):
                assert (result.table, result.db) == (row["table"], row["db"])
