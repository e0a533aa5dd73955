"""The native envelope: ``{id, op, ts_ms, source: {name, db, schema, table}, before, after}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millstream.pipelines.envelopes.envelope import Envelope, json_object, members, number, or_null, plain, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column


class Native(Envelope):
    type: Literal["native"] = "native"

    def column(self) -> Column:
        from pyspark.sql import functions as F

        source = members(*((name, quoted(F.col(name))) for name in ("name", "db", "schema", "table")))
        return json_object(
            id=quoted(F.col("id")),
            op=or_null(plain(F.col("op"))),
            ts_ms=number(F.col("ts_ms")),
            source=source,
            before=or_null(F.col("before")),
            after=or_null(F.col("after")),
        )
