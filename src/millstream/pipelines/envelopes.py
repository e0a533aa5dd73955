"""How an event looks outside, as JSON text made by Spark expressions alone: native, Debezium, CloudEvents, or the row.

To add one, list it in ``AnyEnvelope``. The way back is ``envelope_reader``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from millstream.pipelines.events import plain_columns
from millstream.pipelines.spec.part import NonEmpty, Part, written_as

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


class Native(Envelope):
    type: Literal["native"] = "native"

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        how = quoting(events)
        source = members(*((name, F.col(name), how(name)) for name in ("name", "db", "schema", "table")))
        return json_object(
            id=how("id")(F.col("id")),
            op=or_null(how("op")(F.col("op"))),
            ts_ms=number(F.col("ts_ms")),
            source=source,
            before=or_null(F.col("before")),
            after=or_null(F.col("after")),
        )


class Raw(Envelope):
    type: Literal["raw"]

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        return F.coalesce(F.col("after"), F.col("before"), F.lit("null"))


class Debezium(Envelope):
    """``null_schema`` puts ``"schema": null`` before the payload, as converters without schemas do."""

    type: Literal["debezium"]
    null_schema: bool = False
    connector: NonEmpty = "millstream"

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        how = quoting(events)
        source = json_object(
            version=F.lit('"1"'),
            connector=quoted(F.lit(self.connector)),
            name=or_null(how("name")(F.col("name"))),
            ts_ms=number(F.col("ts_ms")),
            snapshot=F.when(F.col("op") == "r", F.lit('"true"')).otherwise(F.lit('"false"')),
            db=or_null(how("db")(F.col("db"))),
            schema=or_null(how("schema")(F.col("schema"))),
            table=F.concat(or_null(how("table")(F.col("table"))), _place()),
        )
        payload = json_object(
            before=or_null(F.col("before")),
            after=or_null(F.col("after")),
            source=source,
            op=or_null(how("op")(F.col("op"))),
            ts_ms=F.concat(number(F.col("ts_ms")), _transaction()),
        )
        return json_object(schema=F.lit("null") if self.null_schema else None, payload=payload)


def _place() -> Column:
    """More members of ``source``, where an event comes from a database's log. A snapshot's row is of no transaction."""
    from pyspark.sql import functions as F

    transaction = F.col("position.transaction")
    number_or_text = F.when(transaction.rlike("^[0-9]+$"), transaction).otherwise(quoted(transaction))
    of_log = F.when(F.col("op") != "r", F.concat(F.lit(',"txId":'), number_or_text))
    lsn = F.concat(F.lit(',"lsn":'), F.col("position.lsn").cast("string"))
    return F.coalesce(F.concat(F.coalesce(of_log, F.lit("")), lsn), F.lit(""))


def _transaction() -> Column:
    """The member ``transaction`` behind the last one, where there is one."""
    from pyspark.sql import functions as F

    whole = F.concat_ws(":", F.col("position.transaction"), F.col("position.lsn").cast("string"))
    order = (F.col("position.order") + 1).cast("string")
    member = F.concat(F.lit(',"transaction":{"id":'), quoted(whole), F.lit(',"total_order":'), order, F.lit("}"))
    return F.coalesce(F.when(F.col("op") != "r", member), F.lit(""))


HAPPENED = {"c": "created", "u": "updated", "d": "deleted", "r": "snapshot", "t": "truncated"}


class CloudEvents(Envelope):
    content_type = "application/cloudevents+json"
    type: Literal["cloudevents"]
    type_prefix: Annotated[
        str, written_as(r"^[A-Za-z0-9]+([.-][A-Za-z0-9]+)*$", "letters and digits, with dots or dashes between them")
    ] = "millstream"

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        how = quoting(events)
        what = F.create_map(*(F.lit(word) for pair in HAPPENED.items() for word in pair))
        name = F.concat_ws(".", F.lit(self.type_prefix), F.col("table"), F.try_element_at(what, F.col("op")))
        # A URI reference, as the standard asks: whatever the names hold is percent-encoded.
        origin = F.concat(
            *(
                F.coalesce(
                    F.concat(F.lit("/"), F.replace(F.url_encode(F.col(part)), F.lit("+"), F.lit("%20"))), F.lit("")
                )
                for part in ("name", "db", "schema", "table")
            )
        )
        # Without a zone: a local time that a change of the clock leaves out or doubles does not exist in UTC.
        stamp = F.expr("timestampadd(MILLISECOND, ts_ms, TIMESTAMP_NTZ '1970-01-01 00:00:00')").cast("string")
        seconds, milliseconds = F.substring(stamp, 1, 19), F.lpad(F.pmod("ts_ms", F.lit(1000)).cast("string"), 3, "0")
        time = F.concat(F.translate(seconds, " ", "T"), F.lit("."), milliseconds, F.lit("Z"))
        data = json_object(
            op=or_null(how("op")(F.col("op"))),
            ts_ms=number(F.col("ts_ms")),
            before=or_null(F.col("before")),
            after=or_null(F.col("after")),
        )
        head = [
            F.lit('{"specversion":"1.0","id":'),
            how("id")(F.col("id")),
            F.lit(',"source":'),
            quoted(F.when(origin == "", F.lit("/millstream")).otherwise(origin)),
            F.lit(',"type":'),
            quoted(name),
        ]
        optional = [
            F.coalesce(F.concat(F.lit(f',"{member}":'), quoted(text)), F.lit(""))
            for member, text in (("time", time), ("subject", F.nullif(F.col("key"), F.lit(""))))
        ]
        return F.concat(*head, *optional, F.lit(',"datacontenttype":"application/json","data":'), data, F.lit("}"))


def _by_name(value: Any) -> Any:
    """``envelope: debezium`` is short for ``envelope: {type: debezium}``."""
    return {"type": value} if isinstance(value, str) else value


AnyEnvelope = Annotated[
    Annotated[Native | Debezium | CloudEvents | Raw, Field(discriminator="type")], BeforeValidator(_by_name)
]
