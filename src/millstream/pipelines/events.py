"""The one internal event, as the columns of a Spark frame.

``before`` and ``after`` are JSON text: what no processor touches leaves as it came. An event that cannot be processed
carries ``error`` and ``stage``, passes every later stage untouched, and ends in the dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def change_fields(frame: DataFrame, change: Callable[[Column], Column]) -> DataFrame:
    """Applies ``change`` to the fields of ``before`` and of ``after``, each as a map from name to variant.

    A variant keeps what JSON's types say (a number stays a number, a decimal keeps its digits), whatever the table.
    """
    from pyspark.sql import functions as F

    def changed(column: str) -> Column:
        fine = F.col("error").isNull()
        return F.when(fine, F.to_json(change(as_fields(F.col(column))))).otherwise(F.col(column))

    return frame.withColumns({"before": changed("before"), "after": changed("after")})


def as_fields(json_text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.from_json(json_text, "map<string,variant>")


def refuse_bad_rows(frame: DataFrame, *, stage: str) -> DataFrame:
    """Marks what a source would not have let in: what people's own code returns is not trusted.

    An envelope is put together from texts, so a ``before`` that goes on behind its end would write into its neighbours.
    """
    from pyspark.sql import functions as F

    for name in ("before", "after"):
        bad = F.col(name).isNotNull() & ~is_object(F.col(name))
        reason = F.concat(F.lit(f"{name} is no JSON object: "), F.substring(F.col(name), 1, 200))
        frame = fail_where(frame, bad, stage=stage, reason=reason)
    frame = fail_where(frame, F.col("op").isNull(), stage=stage, reason="op is missing")
    unknown = F.concat(F.lit("unknown op "), F.substring(F.col("op"), 1, 20))
    frame = fail_where(frame, ~F.col("op").isin(*OPS), stage=stage, reason=unknown)
    return fail_where(frame, ~F.col("ts_ms").between(0, LAST_MS), stage=stage, reason="ts_ms is no time")


def is_object(text: Column) -> Column:
    """Whether the whole text is one JSON object, and strictly: Spark's own functions also take single quotes, raw
    control characters, and an object with anything behind it."""
    from pyspark.sql import functions as F

    # Spark's parsers stop where a value ends. In a list, what stands behind it is read as well; and no text can hold
    # its own digest, and so pretend that the list ends earlier.
    end = F.sha1(text)
    listed = F.try_parse_json(F.concat(F.lit("["), text, F.lit(',"'), end, F.lit('"]')))
    whole = F.try_variant_get(listed, "$[1]", "string") == end
    return F.coalesce(whole & F.try_variant_get(listed, "$[0]", "map<string,variant>").isNotNull(), F.lit(False))


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
