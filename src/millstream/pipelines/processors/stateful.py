"""Processors with state over batches, within a watermark: aggregate and deduplicate. They run before sql and python."""

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
    """The table of the new events is this processor's id. Their ``after`` has window_start and window_end (in ms), the
    groups by their last name, and the measures: of numbers only, as doubles. Groups keep their types: 1 is not "1"."""

    type: Literal["aggregate"]
    kind = "stateful"
    reorders = True
    renames = True
    makes_events = True
    window: Annotated[Duration, Field(ge=1)]
    """The length of a window of time."""
    slide: Annotated[Duration, Field(ge=1)] | None = None
    """The time between the starts of two windows. By default windows do not overlap."""
    watermark: Duration = 10_000
    """How late an event may arrive and still be counted. A window is emitted after that time."""
    group_by: list[FieldReference] = Field(default_factory=list)
    """The fields by which events are grouped within a window."""
    measures: Annotated[dict[NonEmpty, Annotated[str, AfterValidator(_checked_measure)]], Field(min_length=1)]
    """The results by name: ``count``, or ``sum``, ``avg``, ``min`` or ``max`` of a field, such as
    ``sum(after.amount)``."""

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

    def can_fail(self) -> bool:
        return any(_MEASURE.fullmatch(text).group(2) for text in self.measures.values())  # type: ignore[union-attr]  # checked when the spec was read

    def apply(self, events: DataFrame, stage: ProcessorStage) -> DataFrame:
        from pyspark.sql import functions as F

        for text in self.measures.values():
            # One number beyond the range of a double would make the sum of the whole window infinite.
            reason = f"aggregate: a double cannot hold the number in {text}"
            events = fail_where(events, F.abs(_argument(text)) == float("inf"), stage=stage.name, reason=reason)
        groups = {f"_g{i}": Reference.parse(key).distinct_column(stage.tenant) for i, key in enumerate(self.group_by)}
        measured = {f"_m{i}": _argument(text) for i, text in enumerate(self.measures.values())}
        # An event that failed earlier forms its own group, so that it passes unchanged.
        failed = F.when(F.col("error").isNotNull(), F.col("id"))
        frame = events.withColumns({**groups, **measured, "_failed": failed})
        slide = f"{self.slide} milliseconds" if self.slide else None
        span = F.window("event_time", f"{self.window} milliseconds", slide)
        passed_on = ("key", "db", "schema", "table", "op", "before", "after", "ts_ms", "payload", "error", "stage")
        summed = frame.groupBy(span.alias("_window"), *groups, "_failed").agg(
            *(_measure(text, name).alias(name) for name, text in zip(measured, self.measures.values(), strict=True)),
            F.max("name").alias("_name"),
            *(F.first(name).alias(f"_{name}") for name in passed_on),
        )
        return self._events(summed, list(groups), list(measured), stage, passed_on)

    def _events(
        self,
        summed: DataFrame,
        groups: list[str],
        measured: list[str],
        stage: ProcessorStage,
        passed_on: tuple[str, ...],
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
            "id": F.concat(F.lit(stage.id_prefix), start.cast("string"), F.lit(":"), group_id),
            "table": F.lit(self.id or "aggregate"),
            "op": F.lit("c"),
            "after": json_object(**{write(label)[1:-1]: value for label, value in fields.items()}),
            "ts_ms": end,
        }
        columns: dict[str, Column] = {"id": made["id"], "name": F.col("_name")}
        fine = F.col("_failed").isNull()
        columns["id"] = F.when(fine, made["id"]).otherwise(F.col("_failed"))
        for name in passed_on:
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
    """The fields by which events are compared. By default the id of the event."""
    watermark: Duration = 600_000
    """How long an event is remembered: a repetition within this time is dropped."""

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
            # Events without the key would all be equal, and all but one would be dropped.
            frame = fail_where(frame, F.col(name).isNull(), stage=stage.name, reason=f"deduplicate: {key} is missing")
        own = F.concat(F.lit("\x00"), F.col("id"))
        frame = frame.withColumns({name: F.when(F.col("error").isNull(), F.col(name)).otherwise(own) for name in names})
        # Spark has the form with a watermark only for streams; a batch has all its rows at once.
        once = frame.dropDuplicatesWithinWatermark(names) if frame.isStreaming else frame.dropDuplicates(names)
        return once.drop(*names)
