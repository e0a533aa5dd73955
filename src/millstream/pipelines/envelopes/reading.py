"""Input documents as events: native, Debezium, CloudEvents, or any JSON object as a row. One pass of Spark's parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from millstream.pipelines.envelopes.cloudevents import HAPPENED
from millstream.pipelines.events import LAST_MS, OPS, as_fields, event_frame

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Format = Literal["auto", "native", "debezium", "cloudevents", "row"]

_CHANGE = "op string, before map<string,variant>, after map<string,variant>, source string, ts_ms bigint"
_DOCUMENT = (
    f"{_CHANGE}, id string, payload struct<{_CHANGE}>, specversion string, type string, time string, subject string, "
    f"data struct<{_CHANGE}>, _corrupt string"
)
_SOURCE = "name string, db string, schema string, table string"


@dataclass(frozen=True, slots=True)
class Position:
    """What the source knows of a document, whatever is in it: where it stands, when it came, what to call it."""

    id: Column
    ts_ms: Column
    name: Column
    table: Column
    key: Column | None = None


def read_documents(frame: DataFrame, text: Column, at: Position, form: Format, *, own_ids: bool = False) -> DataFrame:
    """``frame`` as events. What cannot be understood keeps its text as ``payload`` and says why.

    ``own_ids`` takes the id that native events and CloudEvents carry, where there is one; otherwise, and by default,
    the position is the id: it is unique whatever the producers do.
    """
    from pyspark.sql import functions as F

    # Columns of the input that the position is made of are kept beside the parsed document.
    parsed = frame.withColumns(
        {
            "_id": at.id.cast("string"),
            "_ts": at.ts_ms.cast("bigint"),
            "_name": at.name.cast("string"),
            "_table": at.table.cast("string"),
            "_key": (F.lit(None) if at.key is None else at.key).cast("string"),
            "_text": text.cast("string"),
        }
    ).withColumn("_d", F.from_json(F.col("_text"), _DOCUMENT, {"columnNameOfCorruptRecord": "_corrupt"}))
    shaped = parsed.withColumn("_form", _form(form)).withColumn("_c", _change())
    is_row = F.col("_form") == "row"
    # One step each, and each used more than once by the next: so Spark keeps them apart and computes them once.
    shaped = shaped.withColumns(
        {
            "_row": F.when(is_row, F.to_json(as_fields(F.col("_text")))),
            "_s": F.from_json(F.col("_c.source"), _SOURCE),
        }
    ).withColumn("_error", _once(_error()))
    fine = F.col("_error").isNull()
    columns = {
        "id": F.coalesce(F.when(fine, F.col("_d.id")), F.col("_id")) if own_ids else F.col("_id"),
        "key": F.coalesce(F.col("_key"), F.when(F.col("_form") == "cloudevents", F.col("_d.subject"))),
        "name": F.coalesce(F.col("_s.name"), F.col("_name")),
        "db": F.col("_s.db"),
        "schema": F.col("_s.schema"),
        "table": F.coalesce(F.col("_s.table"), F.col("_table")),
        "op": F.when(is_row, F.lit("c")).when(fine, F.col("_c.op")),
        "before": F.when(fine & ~is_row, F.to_json(F.col("_c.before"))),
        "after": F.when(fine, F.when(is_row, F.col("_row")).otherwise(F.to_json(F.col("_c.after")))),
        "ts_ms": F.coalesce(F.when(fine, F.col("_c.ts_ms")), F.col("_ts")),
        "payload": F.when(~fine, F.col("_text")),
        "error": F.col("_error"),
        "stage": F.when(~fine, F.lit("source")),
    }
    return event_frame(shaped, columns, plain=("op",))  # one of OPS, or null


def _once(column: Column) -> Column:
    """The same value, in a form that Spark does not move: a filter that comes later would otherwise be pushed down
    here with everything that it needs, and the document be parsed again for each mention."""
    from pyspark.sql import functions as F

    return F.when(F.spark_partition_id() >= 0, column)


def _form(form: Format) -> Column:
    from pyspark.sql import functions as F

    if form != "auto":
        return F.lit(form)
    changed = F.col("_d.before").isNotNull() | F.col("_d.after").isNotNull()
    whole = F.col("_d._corrupt").isNull()
    return (
        F.when(whole & F.col("_d.specversion").isNotNull(), F.lit("cloudevents"))
        .when(whole & F.col("_d.payload.op").isNotNull(), F.lit("debezium"))
        .when(whole & F.col("_d.op").isNotNull() & (changed | F.col("_d.op").isin("t", "d")), F.lit("native"))
        .otherwise(F.lit("row"))
    )


def _change() -> Column:
    """The part of the document that holds op, before and after."""
    from pyspark.sql import functions as F

    def change(root: str, op: Column, ts_ms: Column, after: Column) -> Column:
        return F.struct(
            op.alias("op"),
            F.col(f"{root}before").alias("before"),
            after.alias("after"),
            F.col(f"{root}source").alias("source"),
            ts_ms.alias("ts_ms"),
        )

    happened = F.element_at(F.split(F.col("_d.type"), r"\."), -1)
    by_type = F.lit("c")
    for op, word in HAPPENED.items():
        by_type = F.when(happened == word, F.lit(op)).otherwise(by_type)
    by_time = F.unix_millis(F.try_to_timestamp(F.col("_d.time")))
    is_change = F.coalesce(F.col("_d.data.op"), F.col("_d.data.source")).isNotNull() | (
        F.col("_d.data.before").isNotNull() | F.col("_d.data.after").isNotNull()
    )
    # A CloudEvent of somebody else's carries the row itself as its data.
    data = F.from_json(F.get_json_object(F.col("_text"), "$.data"), "map<string,variant>")
    event = change(
        "_d.data.",
        F.coalesce(F.col("_d.data.op"), by_type),
        F.coalesce(F.col("_d.data.ts_ms"), by_time),
        F.when(is_change, F.col("_d.data.after")).otherwise(data),
    )
    wrapped = change("_d.payload.", F.col("_d.payload.op"), F.col("_d.payload.ts_ms"), F.col("_d.payload.after"))
    bare = change("_d.", F.col("_d.op"), F.col("_d.ts_ms"), F.col("_d.after"))
    # Debezium without the schema part has no payload around it.
    debezium = F.when(F.col("_d.payload").isNotNull(), wrapped).otherwise(bare)
    return (
        F.when(F.col("_form") == "cloudevents", event)
        .when(F.col("_form") == "debezium", debezium)
        .when(F.col("_form") == "native", bare)
    )


def _error() -> Column:
    """Why this document is no event; null where it is one."""
    from pyspark.sql import functions as F

    form, op = F.col("_form"), F.col("_c.op")
    no_row = F.col("_c.after").isNull() & F.col("_c.before").isNull()
    no_object = F.lit("this is no JSON object")
    wrong_form = F.concat(F.lit("this is no event in the form "), form)
    unreadable = F.when(F.json_object_keys(F.col("_text")).isNull(), no_object).otherwise(wrong_form)
    return (
        F.when(F.col("_text").isNull(), F.lit("the entry has no such field"))
        .when(form == "row", F.when(F.col("_row").isNull(), no_object))
        .when(F.col("_d").isNull() | F.col("_d._corrupt").isNotNull(), unreadable)
        .when((form == "cloudevents") & F.col("_d.specversion").isNull(), F.lit("specversion is missing"))
        .when(op.isNull(), F.lit("op is missing"))
        .when(~op.isin(*OPS), F.concat(F.lit("unknown op "), F.substring(op, 1, 20)))
        .when(~F.coalesce(F.col("_c.ts_ms"), F.lit(0)).between(0, LAST_MS), F.lit("ts_ms is no time"))
        .when(no_row & (op != "t"), F.lit("neither before nor after is an object"))
    ).cast("string")
