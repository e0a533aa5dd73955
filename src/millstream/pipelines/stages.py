"""The chain of processors over a frame: the same for the streaming query, for one batch, and for a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.pipelines.error_origin import called, cause
from millstream.pipelines.errors import ProcessorFailed
from millstream.pipelines.events import COLUMNS, number_repeats
from millstream.pipelines.plan import Numbering, PipelinePlan, Placed
from millstream.pipelines.processors import ProcessorStage
from millstream.pipelines.sinks.sink import TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def before_the_batch(events: DataFrame, plan: PipelinePlan) -> DataFrame:
    """The source's events through stateless and stateful processors, with one watermark for all of them."""
    from pyspark.sql import functions as F

    if plan.watermark_ms is not None:
        # What failed carries the batch's time: it must not be dropped as late, nor hold the watermark back.
        when = F.when(F.col("error").isNull(), F.timestamp_millis("ts_ms"))
        timed = events.withColumn("event_time", F.coalesce(when, F.current_timestamp()))
        events = timed.withWatermark("event_time", f"{plan.watermark_ms} milliseconds")
    events = apply(events, plan.streaming, plan, batch_id=-1, failures=plan.pipeline.spec.source.can_fail())
    return rows_and_times(events, plan) if plan.straight else events


def rows_and_times(events: DataFrame, plan: PipelinePlan) -> DataFrame:
    """What a simple plan's one pass writes, with the events' times beside it."""
    from pyspark.sql import functions as F

    return plan.gating[0].prepare(events, plan.pipeline.tenant, (F.col("ts_ms").alias(TIME),))


def inside_the_batch(frame: DataFrame, plan: PipelinePlan, batch_id: int) -> DataFrame:
    """A batch through what runs per batch. Ids are made unique first: sql and python may rely on them."""
    failures = plan.pipeline.spec.source.can_fail() or any(p.processor.can_fail() for p in plan.streaming)
    numbered = numbered_ids(frame.select(*COLUMNS), plan.numbering, batch_id)
    return apply(numbered, plan.per_batch, plan, batch_id=batch_id, failures=failures)


def numbered_ids(frame: DataFrame, numbering: Numbering, batch_id: int) -> DataFrame:
    if numbering == "none":
        return frame
    return number_repeats(frame, suffix=f"@{batch_id}" if numbering == "by the batch" else "")


def apply(
    events: DataFrame, placed: Sequence[Placed], plan: PipelinePlan, *, batch_id: int, failures: bool
) -> DataFrame:
    quotes = not plan.hidden
    for each in placed:
        stage = ProcessorStage(each.name, plan.pipeline.tenant, batch_id, failures, quotes)
        events = _applied(each, events, stage)
        failures = failures or each.processor.can_fail()
    return events


def _applied(placed: Placed, events: DataFrame, stage: ProcessorStage) -> DataFrame:
    """What Spark refuses here is the query itself: a column that is not there, a word that is no SQL."""
    from pyspark.errors import PySparkException

    try:
        return placed.processor.apply(events, stage)
    except PySparkException as error:
        raise ProcessorFailed(called(placed), cause(error)) from error
