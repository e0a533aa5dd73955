"""What will happen, decided before Spark starts: which stage runs where, who gates the checkpoint, how rows are told
apart when a batch is replayed; and the chain of processors over a frame, as it was decided: the same for the streaming
query, for one batch, and for a replay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from millstream.pipelines.errors import ProcessorFailed, called, cause
from millstream.pipelines.events import COLUMNS, number_repeats
from millstream.pipelines.processors import Processor, ProcessorStage
from millstream.pipelines.redis_address import RedisAddress, has_secret
from millstream.pipelines.sinks import Delivery, Sink
from millstream.pipelines.sinks.sink import TIME
from millstream.pipelines.spec.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Numbering = Literal["none", "in the batch", "by the batch"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A processor and what dead letters, ids and metrics call it."""

    name: str
    processor: Processor


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    address: RedisAddress
    stream: str


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """``streaming`` processors are part of the streaming query; ``per_batch`` ones run inside each batch.

    ``gating`` sinks must have a batch before it is committed; the others find theirs on disk. ``failures``: whether
    any stage can turn an event into a dead letter.
    """

    pipeline: Pipeline
    streaming: tuple[Placed, ...]
    per_batch: tuple[Placed, ...]
    numbering: Numbering
    delivery: Delivery
    delivery_because: str
    watermark_ms: int | None
    gating: tuple[Sink, ...]
    optional: tuple[Sink, ...]
    dead_letters: DeadLetterTarget | None
    failures: bool

    def addresses(self) -> Iterator[tuple[str, RedisAddress]]:
        """Every Redis that the pipeline connects to, and which part of the spec names it."""
        spec = self.pipeline.spec
        for address in spec.source.addresses():
            yield "source", address
        for sink in spec.sinks:
            for address in sink.addresses():
                yield f"sink {sink.config.id}", address
        if self.dead_letters is not None:
            yield "dlq", self.dead_letters.address

    def secrets(self) -> Iterator[str]:
        """Addresses with a password in them."""
        yield from (address.uri for _, address in self.addresses() if has_secret(address.uri))
        yield from self.pipeline.spec.source.secrets()

    @property
    def hidden(self) -> list[Callable[[dict[str, Any]], bool]]:
        """What processors hide in rows: it must not show in dead letters and errors either."""
        found = (each.processor.hides() for each in (*self.streaming, *self.per_batch))
        return [one for one in found if one is not None]

    @property
    def passes(self) -> tuple[tuple[Sink, ...], ...]:
        """The gating sinks, those together that take the same rows and are written in one pass."""
        found: dict[str, list[Sink]] = {}
        for at, sink in enumerate(self.gating):
            found.setdefault(sink.shape() or f"the {at}th alone", []).append(sink)
        return tuple(map(tuple, found.values()))

    @property
    def simple(self) -> bool:
        """One pass that reads to the end, and nothing that can fail: then that pass itself can count everything."""
        if self.failures or self.consumers != 1 or self.optional:
            return False
        sink = self.gating[0]
        return not sink.looks and sink.filter is None and sink.misses(self.pipeline.tenant) is None

    @property
    def straight(self) -> bool:
        """Simple, and nothing happens inside the batch: then the streaming query makes the sink's rows. Spark cuts a
        query in two where a batch begins; before the cut it knows which columns are constant."""
        return self.simple and not self.per_batch and self.numbering == "none"

    @property
    def consumers(self) -> int:
        """How often a batch is read."""
        return len(self.passes) + len(self.optional)


def make_plan(pipeline: Pipeline) -> PipelinePlan:
    spec = pipeline.spec
    placed = [Placed(p.id or f"processors[{i}]", p) for i, p in enumerate(spec.processors)]
    first = next((i for i, p in enumerate(placed) if p.processor.kind == "per batch"), len(placed))
    delivery, because = _delivery(pipeline)
    watermarks = [ms for p in spec.processors if (ms := p.watermark_ms()) is not None]
    gating = [s for s in spec.sinks if s.config.required or spec.commit_policy == "all"]
    ids = spec.source.ids()
    made_anew = any(p.makes_events for p in spec.processors)
    numbering: Numbering = {"unique": "none", "repeat in a batch": "in the batch", "repeat": "by the batch"}[ids]  # type: ignore[assignment]  # mypy does not narrow the values
    return PipelinePlan(
        pipeline=pipeline,
        streaming=tuple(placed[:first]),
        per_batch=tuple(placed[first:]),
        numbering="none" if made_anew else numbering,
        delivery=delivery,
        delivery_because=because,
        watermark_ms=max(watermarks, default=None),
        gating=tuple(gating),
        optional=tuple(s for s in spec.sinks if s not in gating),
        dead_letters=_dead_letters(pipeline),
        failures=spec.source.can_fail() or any(p.can_fail() for p in spec.processors),
    )


def _delivery(pipeline: Pipeline) -> tuple[Delivery, str]:
    """By position where a replay brings the same rows in the same order; by event id wherever it may not."""
    if pipeline.spec.source.reorders:
        return "exactly_once_by_event_id", f"how {pipeline.spec.source.type} rows are cut depends on the cluster"
    for processor in pipeline.spec.processors:
        if processor.reorders:
            return "exactly_once_by_event_id", f"{processor.kind_name} shuffles, and rows have no stable order after it"
    return "exactly_once", "a replay brings the same rows in the same order"


def _dead_letters(pipeline: Pipeline) -> DeadLetterTarget | None:
    dlq = pipeline.spec.dlq
    if not dlq.enabled:
        return None
    known = [address for sink in pipeline.spec.sinks for address in sink.addresses()]
    known += pipeline.spec.source.addresses()
    own = None if dlq.uri is None else RedisAddress(dlq.uri, dlq.password_file)
    address = own or next(iter(known), None)
    return DeadLetterTarget(address, dlq.stream or f"{pipeline.name}.dlq") if address else None


def describe(made: PipelinePlan) -> list[tuple[str, str]]:
    """The plan in words: what, and how."""
    spec = made.pipeline.spec
    lines = [("source", f"{spec.source.type}, ids {spec.source.ids()}")]
    lines += [(p.name, f"{p.processor.kind_name}, {p.processor.kind}, in the streaming query") for p in made.streaming]
    lines += [(p.name, f"{p.processor.kind_name}, {p.processor.kind}, inside each batch") for p in made.per_batch]
    if made.numbering != "none":
        lines.append(("ids", f"rows with equal ids are numbered {made.numbering}"))
    lines.append(("delivery", f"{made.delivery}: {made.delivery_because}"))
    lines.append(("order", order(made)))
    for sink in spec.sinks:
        role = "gates the checkpoint" if sink in made.gating else "optional: batches wait on disk until it has them"
        beside = [s.config.id for one in made.passes if sink in one for s in one if s is not sink]
        together = f", in one pass with {', '.join(beside)}" if beside else ""
        twice = "" if sink.idempotent else "; a replayed batch is written again"
        lines.append((f"sink {sink.config.id}", f"{sink.type}, {role}{together}{twice}"))
    lines.append(("commit", f"policy {spec.commit_policy}"))
    dead = made.dead_letters
    where = (
        f"stream {dead.stream} at {dead.address}"
        if dead
        else "none: an event that cannot be processed stops the pipeline"
    )
    lines.append(("dead letters", where))
    lines.append(("checkpoint", os.path.realpath(made.pipeline.checkpoint_path)))
    return lines


def order(made: PipelinePlan) -> str:
    """Whether events reach a sink in the order of their source, and what decides it."""
    for placed in (*made.streaming, *made.per_batch):
        if placed.processor.reorders:
            return f"not kept: {placed.name} ({placed.processor.kind_name}) shuffles"
    if made.numbering != "none":
        return "not kept: rows with equal ids are numbered, which shuffles"
    kept = made.pipeline.spec.source.order()
    if kept is None:
        return "not kept: a batch is cut into tasks that write side by side; partitions: 1 in the source keeps it"
    return f"kept: {kept}, in every sink"


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
