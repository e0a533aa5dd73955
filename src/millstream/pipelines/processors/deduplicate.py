"""Lets one event through for each key, within a watermark: stateful, so it stands before sql and python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from millstream.pipelines.events import fail_where
from millstream.pipelines.processors.predicates import FieldReference
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import Duration
from millstream.pipelines.templates import Reference

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Deduplicate(Processor):
    """Which of several equal events is kept is not defined. Without ``keys``, the event's id decides."""

    type: Literal["deduplicate"]
    kind = "stateful"
    reorders = True
    keys: Annotated[list[FieldReference], Field(min_length=1)] = Field(default_factory=lambda: ["id"])
    watermark: Duration = 600_000

    def can_fail(self) -> bool:
        return self.keys != ["id"]

    def watermark_ms(self) -> int | None:
        return self.watermark

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        frame = events
        names = [f"_key{index}" for index in range(len(self.keys))]
        for name, key in zip(names, self.keys, strict=True):
            frame = frame.withColumn(name, Reference.parse(key).distinct_column(stage.tenant))
            # Events without the key would all look alike, and all but one would vanish.
            frame = fail_where(frame, F.col(name).isNull(), stage=stage.name, reason=f"deduplicate: {key} is missing")
        own = F.concat(F.lit("\x00"), F.col("id"))
        frame = frame.withColumns({name: F.when(F.col("error").isNull(), F.col(name)).otherwise(own) for name in names})
        # Spark has the watermarked form for streams alone; a batch holds all its rows at once.
        once = frame.dropDuplicatesWithinWatermark(names) if frame.isStreaming else frame.dropDuplicates(names)
        return once.drop(*names)
