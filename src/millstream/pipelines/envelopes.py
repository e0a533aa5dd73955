"""The formats of events in sinks, as JSON text from Spark expressions: native, Debezium, CloudEvents, or the row.

To add one, list it in ``AnyEnvelope``. ``envelope_reader`` reads them.
"""

from __future__ import annotations

from abc import abstractmethod
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

    @abstractmethod
    def column(self, events: DataFrame) -> Column:
        """The document as a column over ``events``."""


def json_object(**members: Any) -> Column:
    """A JSON object from columns that are JSON text already. A member whose column is None is left out."""
    from pyspark.sql import functions as F

    parts: list[Column] = []
    for name, value in members.items():
        if value is None:
            continue
        opening = "{" if not parts else ","
        parts += [F.lit(f'{opening}"{name}":'), value]
    return F.concat(*parts, F.lit("}"))


def quoted(text: Column) -> Column:
    """Text as a JSON string; a null stays null. Escaping is expensive, so only rows that need it are escaped."""
    from pyspark.sql import functions as F

    needs = text.rlike(r'["\\\x00-\x1f]')
    # to_json knows every rule of escaping. It writes {"a":<string>}, and the string is extracted.
    document = F.to_json(F.struct(text.alias("a")))
    escaped = F.substring(document, F.lit(6), F.length(document) - 6)
    # Spark assumes that to_json may return null. Without that, it removes null checks of outer expressions.
    return F.when(needs, F.coalesce(escaped, F.lit('""'))).otherwise(plain(text))


def or_null(text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(text, F.lit("null"))


def number(column: Column) -> Column:
    return or_null(column.cast("string"))


def members(*entries: tuple[str, Column, AsJson]) -> Column:
    """A JSON object from names, values and the format of each value: a null leaves its member out.

    Whether a member needs a comma depends on the nulls of the values before it. If Spark knows that a value is never
    null, it decides that in the plan. Nested to the left, so that Spark merges a constant beginning into one text.
    """
    from pyspark.sql import functions as F

    document, is_written = F.lit("{"), F.lit(False)
    for name, value, as_json in entries:
        label = F.when(is_written, F.lit(f',"{name}":')).otherwise(F.lit(f'"{name}":'))
        document = F.concat(document, F.coalesce(F.concat(label, as_json(value)), F.lit("")))
        is_written = is_written | value.isNotNull()
    return F.concat(document, F.lit("}"))


def plain(text: Column) -> Column:
    """Text that needs no escaping, as a JSON string."""
    from pyspark.sql import functions as F

    return F.concat(F.lit('"'), text, F.lit('"'))


def quoting(events: DataFrame) -> Callable[[str], AsJson]:
    """The function that quotes each column: the search for characters to escape is the most expensive step."""
    plain_names = plain_columns(events)
    return lambda name: plain if name in plain_names else quoted


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
    """The form of Debezium."""

    type: Literal["debezium"]
    null_schema: bool = False
    """true: writes ``"schema": null`` before the payload, as converters without schemas do."""
    connector: NonEmpty = "millstream"
    """The value of ``source.connector``."""

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
    """More members of ``source`` for an event from a database's log. A row of a snapshot has no transaction."""
    from pyspark.sql import functions as F

    transaction = F.col("position.transaction")
    number_or_text = F.when(transaction.rlike("^[0-9]+$"), transaction).otherwise(quoted(transaction))
    of_log = F.when(F.col("op") != "r", F.concat(F.lit(',"txId":'), number_or_text))
    lsn = F.concat(F.lit(',"lsn":'), F.col("position.lsn").cast("string"))
    return F.coalesce(F.concat(F.coalesce(of_log, F.lit("")), lsn), F.lit(""))


def _transaction() -> Column:
    """The member ``transaction`` after the last one, if the event has one."""
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
    """The first part of the type of an event: ``<type_prefix>.<table>.created``."""

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        how = quoting(events)
        verbs = F.create_map(*(F.lit(literal) for pair in HAPPENED.items() for literal in pair))
        name = F.concat_ws(".", F.lit(self.type_prefix), F.col("table"), F.try_element_at(verbs, F.col("op")))
        # The standard requires a URI reference: names are percent-encoded.
        origin = F.concat(
            *(
                F.coalesce(
                    F.concat(F.lit("/"), F.replace(F.url_encode(F.col(part)), F.lit("+"), F.lit("%20"))), F.lit("")
                )
                for part in ("name", "db", "schema", "table")
            )
        )
        # Without a time zone, because local times that a daylight-saving change skips or repeats do not occur in UTC.
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
