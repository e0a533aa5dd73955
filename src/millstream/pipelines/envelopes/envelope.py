"""What an envelope is: a choice in the spec, and the event as JSON text, made by Spark expressions alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from millstream.pipelines.events import plain_columns
from millstream.pipelines.spec.part import Part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

AsJson = Callable[["Column"], "Column"]


class Envelope(Part):
    content_type: ClassVar[str] = "application/json"

    def column(self, events: DataFrame) -> Column:
        """The document as a column over ``events``."""
        raise AssertionError("every envelope has its own")


def json_object(**members: Any) -> Column:
    """A JSON object from columns that are JSON text already. A Python None leaves its member out."""
    from pyspark.sql import functions as F

    parts: list[Column] = []
    for name, value in members.items():
        if value is None:
            continue
        opening = "{" if not parts else ","
        parts += [F.lit(f'{opening}"{name}":'), value]
    return F.concat(*parts, F.lit("}"))


def quoted(text: Column) -> Column:
    """Text as a JSON string; a null stays null. Escaping costs, so it is done only for the rows that need it."""
    from pyspark.sql import functions as F

    needs = text.rlike(r'["\\\x00-\x1f]')
    # to_json knows every rule of escaping; what it writes is {"a":<string>}, of which the string is cut out.
    document = F.to_json(F.struct(text.alias("a")))
    escaped = F.substring(document, F.lit(6), F.length(document) - 6)
    # Spark thinks that to_json may give null. Told otherwise, it drops whatever is asked about nulls further out.
    return F.when(needs, F.coalesce(escaped, F.lit('""'))).otherwise(plain(text))


def or_null(text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(text, F.lit("null"))


def number(column: Column) -> Column:
    return or_null(column.cast("string"))


def members(*those: tuple[str, Column, AsJson]) -> Column:
    """A JSON object of names, values and how each value is written: a null leaves its member out.

    Which member brings a comma is asked of the values' nulls: where Spark knows that a value is never null, it answers
    that when it plans. Nested to the left, so that it makes one text of a constant beginning; the rest it flattens.
    """
    from pyspark.sql import functions as F

    document, some = F.lit("{"), F.lit(False)
    for name, value, as_json in those:
        label = F.when(some, F.lit(f',"{name}":')).otherwise(F.lit(f'"{name}":'))
        document = F.concat(document, F.coalesce(F.concat(label, as_json(value)), F.lit("")))
        some = some | value.isNotNull()
    return F.concat(document, F.lit("}"))


def plain(text: Column) -> Column:
    """Text that is known to need no escaping, as a JSON string."""
    from pyspark.sql import functions as F

    return F.concat(F.lit('"'), text, F.lit('"'))


def quoting(events: DataFrame) -> Callable[[str], AsJson]:
    """How each column of ``events`` is written: looking for what needs escaping is the dearest part of a document."""
    known = plain_columns(events)
    return lambda name: plain if name in known else quoted
