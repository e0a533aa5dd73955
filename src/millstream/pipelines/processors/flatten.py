"""Lifts nested fields of ``before`` and ``after`` to the top: ``address.city`` becomes ``address__city``.

Arrays stay as they are. Each level is one pass over the map of fields, so ``max_depth`` bounds the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millstream.pipelines.events import as_fields, fail_where
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import NonEmpty

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Flatten(Processor):
    """``collision`` decides where two fields get one name: the last one, the first one, or a dead letter."""

    type: Literal["flatten"]
    renames = True
    separator: NonEmpty = "__"
    max_depth: Annotated[int, Field(ge=1, le=8)] = 4
    collision: Literal["last", "first", "error"] = "last"

    def can_fail(self) -> bool:
        return self.collision == "error"

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        flat = {name: self._pairs(as_fields(F.col(name))) for name in ("before", "after")}
        frame = events.withColumns({f"_{name}": pairs for name, pairs in flat.items()})
        if self.collision == "error":
            for name in ("before", "after"):
                names = F.transform(F.col(f"_{name}"), lambda pair: pair["key"])
                twice = F.size(F.array_distinct(names)) < F.size(names)
                reason = F.concat(
                    F.lit(f"flatten: two fields of {name} get one name among "), F.array_join(names, ", ")
                )
                frame = fail_where(frame, twice, stage=stage.name, reason=reason)
        done = {
            name: F.when(F.col("error").isNotNull(), F.col(name)).otherwise(F.to_json(self._unique(F.col(f"_{name}"))))
            for name in ("before", "after")
        }
        return frame.withColumns(done).drop("_before", "_after")

    def _pairs(self, row: Column) -> Column:
        """The fields as an array of (key, value), in order; objects give way to their own fields, level by level."""
        from pyspark.sql import functions as F

        pairs = F.map_entries(row)
        for _ in range(self.max_depth):
            pairs = F.flatten(F.transform(pairs, self._lifted))
        return pairs

    def _lifted(self, pair: Column) -> Column:
        from pyspark.sql import functions as F

        inner = F.map_entries(F.try_variant_get(pair["value"], "$", "map<string,variant>"))
        named = F.transform(
            inner,
            lambda field: F.struct(
                F.concat(pair["key"], F.lit(self.separator), field["key"]).alias("key"), field["value"].alias("value")
            ),
        )
        is_object = F.coalesce(F.schema_of_variant(pair["value"]).startswith("OBJECT<"), F.lit(False))
        return F.when(is_object & (F.size(inner) > 0), named).otherwise(F.array(pair))

    def _unique(self, pairs: Column) -> Column:
        from pyspark.sql import functions as F

        if self.collision == "last":
            kept = F.filter(
                pairs, lambda p, i: ~F.exists(F.slice(pairs, i + 2, F.size(pairs)), lambda q: q["key"] == p["key"])
            )
        else:
            kept = F.filter(pairs, lambda p, i: ~F.exists(F.slice(pairs, 1, i), lambda q: q["key"] == p["key"]))
        return F.map_from_entries(kept)
