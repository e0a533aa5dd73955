"""What an envelope is: a choice in the spec, and the event as JSON text, made by Spark expressions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from millstream.pipelines.spec.part import Part

if TYPE_CHECKING:
    from pyspark.sql import Column


class Envelope(Part):
    content_type: ClassVar[str] = "application/json"

    def column(self) -> Column:
        """The document as a column over the event frame."""
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
    return F.when(needs, escaped).otherwise(F.concat(F.lit('"'), text, F.lit('"')))


def or_null(text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(text, F.lit("null"))


def number(column: Column) -> Column:
    return or_null(column.cast("string"))


def members(*pairs: tuple[str, Column]) -> Column:
    """A JSON object from columns that are JSON text already: a null leaves its member out."""
    from pyspark.sql import functions as F

    shown = [F.coalesce(F.concat(F.lit(f',"{name}":'), text), F.lit("")) for name, text in pairs]
    # Whichever member comes first brings a comma that nobody needs.
    return F.concat(F.lit("{"), F.substring(F.concat(*shown), F.lit(2), F.lit(2**31 - 1)), F.lit("}"))


def plain(text: Column) -> Column:
    """Text that is known to need no escaping, as a JSON string."""
    from pyspark.sql import functions as F

    return F.concat(F.lit('"'), text, F.lit('"'))
