"""CloudEvents 1.0 in its JSON form. The type is the prefix, the table, and what happened: created, updated, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from millstream.pipelines.envelopes.envelope import Envelope, json_object, number, or_null, quoted, quoting
from millstream.pipelines.spec.part import written_as

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
