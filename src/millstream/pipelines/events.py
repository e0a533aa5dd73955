"""The one internal event, as the columns of a Spark frame.

``before`` and ``after`` are JSON text, so values that no processor changes keep their exact text. An event that cannot
be processed has ``error`` and ``stage``, passes every later stage unchanged, and becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from millstream.pipelines.json_text import has_duplicate_members, is_object, parse, write

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

OPS = ("c", "u", "d", "r", "t")
LAST_MS = 253_402_300_799_999  # the end of the year 9999, beyond which dates cannot be written

COLUMNS: dict[str, str] = {
    "id": "string",  # the same after every replay: the position in the source, and the row
    "key": "string",  # the row's key as the source defines it, if it has one
    "name": "string",  # source.name
    "db": "string",
    "schema": "string",
    "table": "string",
    "op": "string",
    "before": "string",
    "after": "string",
    "ts_ms": "bigint",  # when the change happened, by the source's clock
    # The position in a database's log: of the transaction, its id, and the number of the change in it.
    "position": "struct<lsn: bigint, transaction: string, order: bigint>",
    "stream": "string",  # the stream that a route processor chose; null: the sink decides
    "payload": "string",  # the input itself, if it could not be read
    "error": "string",  # why it cannot be processed; null if it can
    "stage": "string",  # the stage that failed
}


SCHEMA = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS.items())
"""The schema of rows from outside: any value may be null, and any text may need escaping."""

_PLAIN = "millstream.plain"


def event_frame(
    frame: DataFrame, columns: dict[str, Column], *, keep: Iterable[str] = (), plain: Collection[str] = ()
) -> DataFrame:
    """``frame`` as events: the given columns, nulls for the others, and the columns ``keep``.

    ``plain`` are columns whose text never needs escaping in JSON, as the source guarantees.
    """
    from pyspark.sql import functions as F

    def made(name: str, kind: str) -> Column:
        column = columns.get(name)
        column = (F.lit(None) if column is None else column).cast(kind)
        return column.alias(name, metadata={_PLAIN: True}) if name in plain else column.alias(name)

    return frame.select(*(made(name, kind) for name, kind in COLUMNS.items()), *keep)


def plain_columns(events: DataFrame) -> frozenset[str]:
    """The columns that still need no escaping: Spark drops the mark when an expression replaces the column."""
    return frozenset(field.name for field in events.schema.fields if field.metadata.get(_PLAIN))


def without_marks(events: DataFrame) -> DataFrame:
    """Removes the marks, for a schema that is stored with its rows: the guarantee holds only in this pipeline."""
    for name in plain_columns(events):
        events = events.withMetadata(name, {})
    return events


def fail_where(frame: DataFrame, condition: Column, *, stage: str, reason: Column | str) -> DataFrame:
    """Marks the events for which ``condition`` is true as failed. An event keeps its first failure."""
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
    """``function`` of one row's values as a column, because Spark's own JSON functions are not exact.

    If it ``returns`` several fields, its result is a tuple of them.
    """
    import pyarrow
    from pyspark.sql import functions as F

    kind = _arrow_type(returns)

    def over_batch(*batch):  # type: ignore[no-untyped-def]  # Spark looks at the annotations, which are text here
        return _as_arrow(list(map(function, *(column.to_pylist() for column in batch))), kind)

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


REFUSED = "the source refused the input: "
"""The start of the reason of a dead letter that does not contain its event, and is not replayed."""
EXCERPT_LENGTH = 1_000
MAX_ENTRY_BYTES = 60 << 20
"""An entry has at most 64 MiB, which include the names of its fields and the envelope."""
MAX_ROW_BYTES = 32 << 20
"""Spark holds several copies of a row: as text, in Arrow, and in the envelope."""


class RowTooLarge(ValueError):
    """A changed row would be too large for an entry."""


def change_rows(
    frame: DataFrame,
    change: Callable[[dict[str, Any]], bool],
    *,
    may_concern: Callable[[str], bool] | None = None,
    grows_at: str | None = None,
) -> DataFrame:
    """Applies ``change`` to the rows ``before`` and ``after``, in place; if it returns False, the text is kept.

    A row with duplicate members is always rewritten: ``change`` sees only the last member with a name, and an earlier
    one must not bypass a mask or a select.

    ``may_concern`` examines only the text: false if there is nothing to change, so that the row need not be parsed.

    ``grows_at`` is the stage of a change that can enlarge a row many times, and raises RowTooLarge. Then the event
    fails, and keeps its original rows.
    """
    from pyspark.sql import functions as F

    def changed(text: str | None, error: str | None) -> str | None:
        if text is None or error is not None or (may_concern is not None and not may_concern(text)):
            return text
        row = parse(text)
        try:
            return write(row) if change(row) or has_duplicate_members(text) else text
        except RowTooLarge:
            return None

    names = ("before", "after")
    columns = {name: per_row(changed, "string", F.col(name), F.col("error")) for name in names}
    if grows_at is None:
        return frame.withColumns(columns)
    frame = frame.withColumns({f"_new_{name}": column for name, column in columns.items()})
    for name in names:
        lost = F.col(name).isNotNull() & F.col(f"_new_{name}").isNull()
        reason = f"{name} would have more than {MAX_ROW_BYTES} bytes"
        frame = fail_where(frame, lost, stage=grows_at, reason=reason)
    fine = F.col("error").isNull()
    columns = {name: F.when(fine, F.col(f"_new_{name}")).otherwise(F.col(name)) for name in names}
    return frame.withColumns(columns).drop(*(f"_new_{name}" for name in names))


def refuse_bad_rows(frame: DataFrame, *, stage: str) -> DataFrame:
    """Marks rows that a source would refuse, because results of user code are not trusted.

    An envelope is concatenated from texts, so a ``before`` with more text after its end would change other members.
    """
    from pyspark.sql import functions as F

    sizes = [F.coalesce(F.octet_length(name), F.lit(0)) for name in ("before", "after")]
    reason = F.concat(F.lit(f"{REFUSED}the result has "), (sizes[0] + sizes[1]).cast("string"), F.lit(" bytes"))
    frame = frame.withColumn("_large", sizes[0] + sizes[1] > MAX_ROW_BYTES)
    frame = fail_where(frame, F.col("_large"), stage=stage, reason=reason)
    excerpt = F.substring(F.coalesce("after", "before"), 1, EXCERPT_LENGTH)
    frame = frame.withColumn("payload", F.when(F.col("_large"), excerpt).otherwise(F.col("payload")))
    columns = {name: F.when(~F.col("_large"), F.col(name)) for name in ("before", "after")}
    frame = frame.withColumns(columns).drop("_large")
    for name in ("before", "after"):
        bad = F.col(name).isNotNull() & ~per_row(is_object, "boolean", F.col(name))
        frame = fail_where(frame, bad, stage=stage, reason=f"{name} is no JSON object")
    frame = fail_where(frame, F.col("op").isNull(), stage=stage, reason="op is missing")
    unknown = F.concat(F.lit("unknown op "), F.substring(F.col("op"), 1, 20))
    frame = fail_where(frame, ~F.col("op").isin(*OPS), stage=stage, reason=unknown)
    return fail_where(frame, ~F.col("ts_ms").between(0, LAST_MS), stage=stage, reason="ts_ms is no time")


def number_repeats(frame: DataFrame, *, suffix: str = "") -> DataFrame:
    """Makes ids unique: of several events with one id the first keeps it, the next ones get ``.1``, ``.2``.

    The order within one id is by content, so that a replay gives each event the same id; equal events are
    interchangeable. It needs a shuffle, so it runs inside the batch. ``suffix`` is appended to every id.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    content = [F.col(name) for name in ("table", "op", "before", "after", "ts_ms", "key", "payload", "error")]
    same_id = Window.partitionBy("id").orderBy(*content)
    nth = F.row_number().over(same_id) - 1
    numbered = F.when(nth > 0, F.concat(F.col("id"), F.lit(suffix + "."), nth.cast("string")))
    return frame.withColumn("id", numbered.otherwise(F.concat(F.col("id"), F.lit(suffix))))
