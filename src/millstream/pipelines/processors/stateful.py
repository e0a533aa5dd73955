"""What keeps state over batches, within a watermark, and so stands before sql and python: aggregate and deduplicate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelopes import json_object, number, or_null
from millstream.pipelines.events import event_frame, fail_where, per_row
from millstream.pipelines.json_text import write
from millstream.pipelines.processors.filter import FieldReference
from millstream.pipelines.processors.processor import Processor, ProcessorStage
from millstream.pipelines.spec.part import Duration, NonEmpty
from millstream.pipelines.templates import Reference, TemplateError, as_json

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MEASURE = re.compile(r"(count|sum|avg|min|max)(?:\((\S+)\))?")


def _checked_measure(text: str) -> str:
    match = _MEASURE.fullmatch(text)
    if match is None or (match.group(1) == "count") != (match.group(2) is None):
        raise PydanticCustomError("measure", "write count, or sum, avg, min or max of a field: sum(after.amount)")
    if match.group(2):
        try:
            Reference.parse(match.group(2))
        except TemplateError as error:
            raise PydanticCustomError("measure", "{why}", {"why": str(error)}) from error
    return text


class Aggregate(Processor):
    """The new events' table is this processor's id; their ``after`` holds window_start, window_end (both in ms), the
    groups by their last name, and the measures: of numbers alone, as doubles. Groups keep their types: 1 is not "1"."""

    type: Literal["aggregate"]
    kind = "stateful"
    reorders = True
    renames = True
    makes_events = True
    window: Annotated[Duration, Field(ge=1)]
    slide: Annotated[Duration, Field(ge=1)] | None = None
    watermark: Duration = 10_000
    group_by: list[FieldReference] = Field(default_factory=list)
    measures: Annotated[dict[NonEmpty, Annotated[str, AfterValidator(_checked_measure)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct_names(self) -> Aggregate:
        names = [*(key.rpartition(".")[2] for key in self.group_by), *self.measures, "window_start", "window_end"]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PydanticCustomError(
                "aggregate", "{names}: this name is used twice", {"names": ", ".join(sorted(twice))}
            )
        return self

    def watermark_ms(self) -> int | None:
        return self.watermark

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        groups = {f"_g{i}": Reference.parse(key).distinct_column(stage.tenant) for i, key in enumerate(self.group_by)}
        measured = {f"_m{i}": _argument(text) for i, text in enumerate(self.measures.values())}
        # An event that failed before is a group of its own: it passes through the state, instead of being summed up.
        failed = F.when(F.col("error").isNotNull(), F.col("id"))
        frame = events.withColumns({**groups, **measured, "_failed": failed})
        slide = f"{self.slide} milliseconds" if self.slide else None
        span = F.window("event_time", f"{self.window} milliseconds", slide)
        kept = ("key", "db", "schema", "table", "op", "before", "after", "ts_ms", "payload", "error", "stage")
        summed = frame.groupBy(span.alias("_window"), *groups, "_failed").agg(
            *(_measure(text, name).alias(name) for name, text in zip(measured, self.measures.values(), strict=True)),
            F.max("name").alias("_name"),
            *(F.first(name).alias(f"_{name}") for name in kept),
        )
        return self._events(summed, list(groups), list(measured), stage, kept)

    def _events(
        self, summed: DataFrame, groups: list[str], measured: list[str], stage: ProcessorStage, kept: tuple[str, ...]
    ) -> DataFrame:
        from pyspark.sql import functions as F

        start, end = (F.unix_millis(F.col(f"_window.{edge}")) for edge in ("start", "end"))
        labels = [key.rpartition(".")[2] for key in self.group_by]
        fields = {"window_start": number(start), "window_end": number(end)}
        fields |= {label: per_row(as_json, "string", F.col(name)) for name, label in zip(groups, labels, strict=True)}
        fields |= {
            label: or_null(F.to_json(F.col(name).cast("variant")))
            for name, label in zip(measured, self.measures, strict=True)
        }
        group_id = F.sha1(F.to_json(F.struct(*(F.col(name) for name in groups)))) if groups else F.lit("all")
        made = {
            "id": F.concat_ws(":", F.lit(self.id or stage.name), start.cast("string"), group_id),
            "table": F.lit(self.id or "aggregate"),
            "op": F.lit("c"),
            "after": json_object(**{write(label)[1:-1]: value for label, value in fields.items()}),
            "ts_ms": end,
        }
        columns: dict[str, Column] = {"id": made["id"], "name": F.col("_name")}
        fine = F.col("_failed").isNull()
        columns["id"] = F.when(fine, made["id"]).otherwise(F.col("_failed"))
        for name in kept:
            columns[name] = F.when(fine, made[name] if name in made else F.lit(None)).otherwise(F.col(f"_{name}"))
        return event_frame(summed, columns)


def _argument(text: str) -> Column:
    from pyspark.sql import functions as F

    match = _MEASURE.fullmatch(text)
    assert match is not None, "checked when the spec was read"
    return F.lit(1.0) if match.group(2) is None else Reference.parse(match.group(2)).number_column()


def _measure(text: str, argument: str) -> Column:
    from pyspark.sql import functions as F

    kind = text.partition("(")[0]
    return {"count": F.count, "sum": F.sum, "avg": F.avg, "min": F.min, "max": F.max}[kind](argument)


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
