"""The native envelope, ``{id, op, ts_ms, source: {name, db, schema, table}, before, after}``; and none: the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millstream.pipelines.envelopes.envelope import Envelope, json_object, members, number, or_null, quoting

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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
