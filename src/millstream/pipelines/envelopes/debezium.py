"""Debezium's envelope: ``{payload: {before, after, source: {...}, op, ts_ms}}``, under a null schema if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millstream.pipelines.envelopes.envelope import Envelope, json_object, number, or_null, quoted, quoting
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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
