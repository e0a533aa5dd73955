"""No envelope: the row itself, ``after``, or ``before`` where a delete has no after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from millstream.pipelines.envelopes.envelope import Envelope

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Raw(Envelope):
    type: Literal["raw"]

    def column(self, events: DataFrame) -> Column:
        from pyspark.sql import functions as F

        return F.coalesce(F.col("after"), F.col("before"), F.lit("null"))
