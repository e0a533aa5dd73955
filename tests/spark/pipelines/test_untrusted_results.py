"""Results of sql and python are checked before they become events: hostile values are dead-lettered or escaped, and
every document is JSON."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from frames import collected, event, events, processor, through
from pydantic import TypeAdapter
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millstream.pipelines.envelope_reader import SourcePosition, read_documents
from millstream.pipelines.envelopes import AnyEnvelope, Envelope, Native
from millstream.pipelines.events import plain_columns
from millstream.pipelines.processors import ProcessorStage
from millstream.pipelines.sinks.redis import RedisSink
from millstream.pipelines.sources.generator import GeneratorSource
from millstream.pipelines.sources.spark import SparkSource

pytestmark = pytest.mark.spark

A = {"id": 1, "status": "paid"}
B = {"id": 2, "status": "new"}


def _ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


NASTY = ('"', "\\", "\n\x01", '","op":"d', "")


def overwritten(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Sets the text columns of each row to the values in its ``after``."""
    after = [json.loads(text) for text in batch.column("after").to_pylist()]
    names = ["id", "key", "name", "db", "schema", "table", "op"]
    texts = [pa.array([row.get(name, "c") for row in after], pa.string()) for name in names]
    return pa.RecordBatch.from_arrays([*texts, batch.column("after")], names=[*names, "after"])


OVERWRITTEN = "SELECT {}, after FROM events".format(
    ", ".join(
        f"coalesce(after:{n}::string, 'c') AS `{n}`" for n in ("id", "key", "name", "db", "schema", "table", "op")
    )
)
BY_OTHERS = pytest.mark.parametrize(
    "spec",
    [{"type": "python", "function": "test_untrusted_results:overwritten"}, {"type": "sql", "query": OVERWRITTEN}],
    ids=["python", "sql"],
)
ENVELOPES: TypeAdapter[Envelope] = TypeAdapter(AnyEnvelope)


@BY_OTHERS
@pytest.mark.parametrize("envelope", ["native", "debezium", "cloudevents"])
def test_result_of_user_code_is_valid_json(spark: SparkSession, spec: dict[str, Any], envelope: str) -> None:
    names = ("id", "name", "db", "schema", "table", "op")
    values = [{name: f"{number}{text}", "number": number} for number, text in enumerate(NASTY) for name in names]
    frame = events(spark, [event(number, row) for number, row in enumerate(values)])
    made = processor(**spec).apply(frame, ProcessorStage("s"))
    sink = RedisSink.model_validate(
        {"type": "redis", "config": {"id": "r", "uri": "redis://localhost", "stream": "s", "envelope": envelope}}
    )
    # Failed ones too: dead letters carry their documents.
    columns = [ENVELOPES.validate_python(envelope).column(made).alias("event"), sink._headers(made, "")]
    for row in made.select(*columns).collect():
        document, headers = map(json.loads, row)
        written = document.get("payload") or document.get("data") or document
        own = written["after"]
        assert written["op"] == headers["op"] == own.get("op", "c")
        assert headers["table"] == own.get("table", "c")
        if envelope != "cloudevents":
            assert {name: written["source"][name] for name in names[1:5]} == {n: own.get(n, "c") for n in names[1:5]}
        if envelope != "debezium":
            assert document["id"].startswith(own.get("id", "c"))


@BY_OTHERS
def test_unknown_op_is_a_dead_letter(spark: SparkSession, spec: dict[str, Any]) -> None:
    rows = [event(n, {"id": f"s:{n}", "op": op}) for n, op in enumerate((*"cudrt", *NASTY, "cc", "C"))]
    made = through(spark, rows, **spec)
    assert [row["error"] for row in made if row["after"]["op"] in list("cudrt")] == [None] * 5
    bad = [row for row in made if row["after"]["op"] not in list("cudrt")]
    assert [(row["error"], row["stage"]) for row in bad] == [
        (f"unknown op {row['after']['op']}", "processors[0]") for row in bad
    ]
    assert len(bad) == len(NASTY) + 2


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ("CAST(NULL AS STRING) AS op", "op is missing"),
        ("-1 AS ts_ms", "ts_ms is no time"),
        ("9223372036854775807 AS ts_ms", "ts_ms is no time"),
    ],
)
def test_sql_may_not_return_rows_that_a_source_would_refuse(spark: SparkSession, column: str, why: str) -> None:
    others = "op, after, id" if "ts_ms" in column else "after, id"
    [row] = through(spark, [event(1, A)], type="sql", query=f"SELECT {others}, {column} FROM events")
    assert (row["error"], row["stage"]) == (why, "processors[0]")


@pytest.mark.parametrize(
    "text",
    [
        "{'a': 1}",
        '{"a":1} x',
        '{"a":1},"op":"d"',
        '{"a":1}]',
        '{"a":1},"the end"',
        '{"a":1},"the end"] and more',
        '{"a":1}}',
        '{"a":"\n"}',
        '{"a":NaN}',
        '["a"]',
        "",
        "null",
    ],
)
def test_a_row_must_be_one_json_object_from_end_to_end(spark: SparkSession, text: str) -> None:
    """The text comes from a second view: in ``events`` itself the sql processor refuses it before the query runs."""
    good = ' {"a": {"b": [1, null, "é"]}}\n'
    query = "SELECT id, op, CAST(null AS STRING) AS before, txt AS after FROM texts JOIN events USING (id)"
    texts = events(spark, [event(1, text), event(2, good), event(3, {})])
    texts.select("id", F.col("after").alias("txt")).createOrReplaceTempView("texts")
    frame = events(spark, [event(1, A), event(2, A), event(3, A)])
    try:
        made = processor(type="sql", query=query).apply(frame, ProcessorStage("s")).orderBy("id").collect()
    finally:
        spark.catalog.dropTempView("texts")
    assert [row["error"] for row in made] == ["after is no JSON object", None, None]
    assert made[0]["stage"] == "s"


@pytest.mark.parametrize("text", ["{'a': 1}", '{"a":1} x', '{"a":NaN}', '{"a":1,"a":2}', ""])
def test_sql_dead_letters_an_input_row_that_is_no_json_object(spark: SparkSession, text: str) -> None:
    frame = events(spark, [event(1, text), event(2, A)])
    sql = processor(type="sql", query="SELECT id, op, after FROM events")
    made = sql.apply(frame, ProcessorStage("s")).orderBy("id").collect()
    assert [(row["error"] is not None, row["stage"]) for row in made] == [(True, "s"), (False, None)]
    assert made[0]["after"] == text


def test_sql_gives_an_id_to_a_row_that_has_none(spark: SparkSession) -> None:
    query = "SELECT if(after:id::int = 1, id, null) AS id, op, after FROM events"
    made = through(spark, [event(1, A), event(2, B), event(3, B | {"id": 3})], type="sql", query=query)
    assert len(set(_ids(made))) == 3
    assert sum(":processors[0]:7:" in id for id in _ids(made)) == 2


def test_sql_keeps_columns_that_only_look_like_an_event_s_own(spark: SparkSession) -> None:
    query = "SELECT id, op, 'boom' AS error, 'late' AS stage, 'body' AS payload FROM events"
    [row] = through(spark, [event(1, A)], type="sql", query=query)
    assert row["after"] == {"error": "boom", "stage": "late", "payload": "body"}
    assert (row["error"], row["stage"], row["payload"]) == (None, None, None)


def nameless(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index("id"), "id", pa.nulls(batch.num_rows, pa.string()))


def test_python_may_not_remove_the_id_of_an_event(spark: SparkSession) -> None:
    made = through(spark, [event(1, A), event(2, B)], type="python", function="test_untrusted_results:nameless")
    assert _ids(made) == ["s:1", "s:2"]
    assert all("without an id" in row["error"] for row in made)


def test_plain_columns_are_not_searched_for_characters_to_escape(spark: SparkSession) -> None:
    numbers = spark.range(4).select(F.col("id").alias("n"), F.col("id").alias("ts_ms"))
    reported = GeneratorSource(type="generator").to_events(numbers)
    assert "rlike(op" not in str(Native().column(reported)).lower()
    assert "rlike(op" in str(Native().column(reported.withColumn("op", F.upper("op")))).lower()
    position = SourcePosition(id=F.col("at"), ts_ms=F.lit(7), name=F.lit("in"), table=F.lit("t"))
    documents = [(str(n), json.dumps({"op": op, "after": {}})) for n, op in enumerate(("u", 'x"'))]
    frame = spark.createDataFrame(documents, "at string, text string")
    read = read_documents(frame, F.col("text"), position, "native")
    assert plain_columns(read) == {"op"}
    assert sorted((row["op"], row["error"]) for row in read.fillna("").collect()) == [("", 'unknown op x"'), ("u", "")]


def test_empty_id_counts_as_missing(spark: SparkSession) -> None:
    rows = [event(number, {"id": number}) for number in range(3)]
    query = {"type": "sql", "query": "SELECT '' AS id, after FROM events"}
    made = through(spark, rows, **query)
    assert len(set(_ids(made))) == 3
    assert "" not in _ids(made)
    made = through(spark, rows, type="python", function="test_untrusted_results:without_ids")
    assert [row["error"] for row in made] == [
        "python: ValueError: the function returned an event without an id: a replay could not be recognized"
    ] * 3


def without_ids(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(0, "id", pa.array([""] * batch.num_rows))


def test_row_of_a_spark_source_without_its_event_id_is_a_dead_letter(spark: SparkSession) -> None:
    config = {"format": "delta", "event_id": "own"}
    source = SparkSource.model_validate({"type": "spark", "config": config})
    rows = spark.createDataFrame([("a", 1), ("", 2), (None, 3), ("b", 4)], "own string, n int")
    made = collected(source.to_events(rows))
    assert [row["id"] for row in made if row["error"] is None] == ["delta:a", "delta:b"]
    failed = [row for row in made if row["error"] is not None]
    assert len({row["id"] for row in failed}) == 2
    assert {row["error"] for row in failed} == {"the source refused the input: event_id is null or empty"}


def test_row_of_a_spark_source_whose_time_is_no_time_is_a_dead_letter(spark: SparkSession) -> None:
    source = SparkSource.model_validate({"type": "spark", "config": {"format": "delta", "event_id": "id", "ts": "t"}})
    times = ["0", "253402300799999", None, "abc", "-1", "253402300800000", "9223372036854775807", "1" + "0" * 30]
    rows = spark.createDataFrame([(str(at), t) for at, t in enumerate(times)], "id string, t string")
    made = collected(source.to_events(rows))
    fine = {row["id"]: row["ts_ms"] for row in made if row["error"] is None}
    assert fine == {"delta:0": 0, "delta:1": 253_402_300_799_999, "delta:2": None}
    failed = {row["id"]: (row["error"], row["ts_ms"]) for row in made if row["error"] is not None}
    reason = "the source refused the input: ts is not a time"
    assert failed == {f"delta:{at}": (reason, None) for at in range(3, len(times))}


def test_whole_row_of_a_spark_source_has_its_nulls_and_any_name(spark: SparkSession) -> None:
    source = SparkSource.model_validate({"type": "spark", "config": {"format": "delta"}})
    rows = spark.createDataFrame([(1, None, "x")], "id int, n int, t string").toDF("id", "a.b", "c`d}")
    [row] = collected(source.to_events(rows))
    assert (row["error"], row["after"]) == (None, {"id": 1, "a.b": None, "c`d}": "x"})
