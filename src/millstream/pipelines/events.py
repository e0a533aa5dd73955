"""The one internal event, as the columns of a Spark frame.

``before`` and ``after`` are JSON text: what no processor touches leaves as it came. An event that cannot be processed
carries ``error`` and ``stage``, passes every later stage untouched, and ends in the dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from millstream.pipelines.json_text import is_object, parse, write

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

OPS = ("c", "u", "d", "r", "t")
LAST_MS = 253_402_300_799_999  # the end of the year 9999, beyond which dates cannot be written

COLUMNS: dict[str, str] = {
    "id": "string",  # the same after every replay: the source's position, and the row
    "key": "string",  # what the source calls the row's key, if anything
    "name": "string",  # source.name
    "db": "string",
    "schema": "string",
    "table": "string",
    "op": "string",
    "before": "string",
    "after": "string",
    "ts_ms": "bigint",  # when the change happened, as the source says
    # Where it stands in a database's log: the transaction's place, the transaction, and which change of it this is.
    "position": "struct<lsn: bigint, transaction: string, order: bigint>",
    "stream": "string",  # where a route processor sends it; null: wherever the sink says
    "payload": "string",  # the input as it came, where it could not be understood
    "error": "string",  # why it cannot be processed; null: it can
    "stage": "string",  # which stage said so
}


SCHEMA = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
"""For rows that come from elsewhere: anything may be null, and nothing is known to be plain."""

_PLAIN = "millstream.plain"


def event_frame(
    frame: DataFrame, columns: dict[str, Column], *, keep: Iterable[str] = (), plain: Collection[str] = ()
) -> DataFrame:
    """``frame`` as events: the given columns, null for those that are not given, and nothing else but ``keep``.

    ``plain`` are columns whose text never needs escaping in JSON, whatever the row: a promise of the source's.
    """
    from pyspark.sql import functions as F

    def made(name: str, kind: str) -> Column:
        found = columns.get(name)
        column = (F.lit(None) if found is None else found).cast(kind)
        return column.alias(name, metadata={_PLAIN: True}) if name in plain else column.alias(name)

    return frame.select(*(made(name, kind) for name, kind in COLUMNS.items()), *keep)


def plain_columns(events: DataFrame) -> frozenset[str]:
    """The columns that are still as promised: Spark drops the mark with the column, when an expression replaces it."""
    return frozenset(field.name for field in events.schema.fields if field.metadata.get(_PLAIN))


def without_marks(events: DataFrame) -> DataFrame:
    """For where a schema is stored with its rows: the promise is about this pipeline, not about whatever follows."""
    for name in plain_columns(events):
        events = events.withMetadata(name, {})
    return events


def fail_where(frame: DataFrame, condition: Column, *, stage: str, reason: Column | str) -> DataFrame:
    """Marks the events for which ``condition`` is true; the first failure of an event is the one that is kept."""
    from pyspark.sql import functions as F

    text = F.lit(reason) if isinstance(reason, str) else reason
    fails = F.col("error").isNull() & F.coalesce(condition, F.lit(False))
    return frame.withColumns(
        {
            "error": F.when(fails, text).otherwise(F.col("error")),
            "stage": F.when(fails, F.lit(stage)).otherwise(F.col("stage")),
        }
    )


def per_row(function: Callable[..., Any], returns: str, *columns: Column) -> Column:
    """``function`` of one row's values as a column: for what Spark's own functions do to JSON is not exact.

    Where it ``returns`` several fields, it gives a tuple of them.
    """
    import pyarrow
    from pyspark.sql import functions as F

    kind = _arrow_type(returns)

    def over_batch(*batch):  # type: ignore[no-untyped-def]  # Spark looks at the annotations, which are text here
        return _as_arrow(list(map(function, *(one.to_pylist() for one in batch))), kind)

    over_batch.__annotations__ = {"batch": pyarrow.Array, "return": pyarrow.Array}
    udf = F.arrow_udf  # type: ignore[attr-defined]  # pyspark's stub file forgets it
    return udf(over_batch, returns)(*columns)  # type: ignore[no-any-return]


def _as_arrow(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Column by column: Arrow takes a list of texts much faster than a list of records."""
    import pyarrow

    if not pyarrow.types.is_struct(kind) or not values:
        return pyarrow.array(values, kind)
    columns = zip(*values, strict=True)
    return pyarrow.StructArray.from_arrays(
        [pyarrow.array(column, field.type) for column, field in zip(columns, kind, strict=True)], fields=list(kind)
    )


def _arrow_type(returns: str) -> pa.DataType:
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import _parse_datatype_string

    return to_arrow_type(_parse_datatype_string(returns))


def change_rows(
    frame: DataFrame, change: Callable[[dict[str, Any]], bool], *, may_concern: Callable[[str], bool] | None = None
) -> DataFrame:
    """Applies ``change`` to the rows ``before`` and ``after``, in place; where it says False, the text stays.

    ``may_concern`` looks at the text alone: false only where there is nothing to change, so that it need not be parsed.
    """
    from pyspark.sql import functions as F

    def changed(text: str | None, error: str | None) -> str | None:
        if text is None or error is not None or (may_concern is not None and not may_concern(text)):
            return text
        row = parse(text)
        return write(row) if change(row) else text

    columns = {name: per_row(changed, "string", F.col(name), F.col("error")) for name in ("before", "after")}
    return frame.withColumns(columns)


def as_0_1_0_wrote(frame: DataFrame) -> DataFrame:
    """Rows as 0.1.0 took them in: without spaces, their members by name, their numbers as Spark writes them."""
    from pyspark.sql import functions as F

    return frame.withColumns(
        {name: F.to_json(F.from_json(F.col(name), "map<string,variant>")) for name in ("before", "after")}
    )


def refuse_bad_rows(frame: DataFrame, *, stage: str) -> DataFrame:
    """Marks what a source would not have let in: what people's own code returns is not trusted.

    An envelope is put together from texts, so a ``before`` that goes on behind its end would write into its neighbours.
    """
    from pyspark.sql import functions as F

    for name in ("before", "after"):
        bad = F.col(name).isNotNull() & ~per_row(is_object, "boolean", F.col(name))
        frame = fail_where(frame, bad, stage=stage, reason=f"{name} is no JSON object")
    frame = fail_where(frame, F.col("op").isNull(), stage=stage, reason="op is missing")
    unknown = F.concat(F.lit("unknown op "), F.substring(F.col("op"), 1, 20))
    frame = fail_where(frame, ~F.col("op").isin(*OPS), stage=stage, reason=unknown)
    return fail_where(frame, ~F.col("ts_ms").between(0, LAST_MS), stage=stage, reason="ts_ms is no time")


def number_repeats(frame: DataFrame, *, suffix: str = "") -> DataFrame:
    """Makes ids unique: of several events with one id the first keeps it, the next get ``.1``, ``.2`` behind it.

    The order within one id is by content, so that a replay gives each event the id that it had; events that are
    equal in everything are interchangeable. Needs a shuffle, and so stands inside the batch. ``suffix`` goes behind
    every id.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    content = [F.col(name) for name in ("table", "op", "before", "after", "ts_ms", "key", "payload", "error")]
    same_id = Window.partitionBy("id").orderBy(*content)
    nth = F.row_number().over(same_id) - 1
    numbered = F.when(nth > 0, F.concat(F.col("id"), F.lit(suffix + "."), nth.cast("string")))
    return frame.withColumn("id", numbered.otherwise(F.concat(F.col("id"), F.lit(suffix))))
