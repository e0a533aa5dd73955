"""The plan of a pipeline, made before Spark starts: which stage runs where, which sinks gate the checkpoint, how a
replay identifies rows. It also applies the processors to a frame: in the streaming query, in a batch, and in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from millstream.pipelines.errors import ProcessorFailed, called, cause
from millstream.pipelines.events import COLUMNS, fail_where, number_repeats
from millstream.pipelines.processors import Processor, ProcessorStage
from millstream.pipelines.processors.fields import hidden_before
from millstream.pipelines.redis_address import RedisAddress, has_secret
from millstream.pipelines.sinks import Delivery, Sink
from millstream.pipelines.sinks.sink import TIME
from millstream.pipelines.spec.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FUTURE_TOLERANCE_MS = 3_600_000
"""How far an event's time may be ahead of this machine's clock if a processor keeps state by time."""
_WATERMARK_DELAY = "spark.watermarkDelayMs"
Numbering = Literal["none", "in the batch", "by the batch"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A processor and its name in dead letters, ids and metrics."""

    name: str
    processor: Processor


@dataclass(frozen=True, slots=True)
class DeadLetterTarget:
    address: RedisAddress
    stream: str


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """``streaming`` processors are part of the streaming query; ``per_batch`` ones run inside each batch.

    ``gating`` sinks must have a batch before it is committed; the others read theirs from queues. ``failures``: whether
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
        """The addresses that contain a password."""
        yield from (address.uri for _, address in self.addresses() if has_secret(address.uri))
        yield from self.pipeline.spec.source.secrets()

    @property
    def hidden(self) -> list[Callable[[dict[str, Any]], bool]]:
        """The masks of all processors, which also apply to dead letters and errors."""
        return hidden_before([stage.processor for stage in (*self.streaming, *self.per_batch)])

    def hidden_by_stage(self) -> dict[str, list[Callable[[dict[str, Any]], bool]]]:
        """The masks that an event has not passed yet, by the stage at which it failed."""
        placed = [*self.streaming, *self.per_batch]
        processors = [stage.processor for stage in placed]
        processors_hidden = {stage.name: hidden_before(processors, at) for at, stage in enumerate(placed)}
        sinks = {
            f"sink:{sink.config.id}": hidden_before(processors, len(processors)) for sink in self.pipeline.spec.sinks
        }
        return {"source": hidden_before(processors), **processors_hidden, **sinks}

    @property
    def passes(self) -> tuple[tuple[Sink, ...], ...]:
        """The gating sinks, grouped by shape: each group is written in one pass."""
        by_shape: dict[str, list[Sink]] = {}
        for at, sink in enumerate(self.gating):
            by_shape.setdefault(sink.shape() or f"the {at}th alone", []).append(sink)
        return tuple(map(tuple, by_shape.values()))

    @property
    def simple(self) -> bool:
        """Whether one pass reads all rows and nothing can fail: then the pass itself counts the events."""
        if self.failures or self.consumers != 1 or self.optional:
            return False
        sink = self.gating[0]
        return not sink.looks and sink.filter is None and sink.misses(self.pipeline.tenant) is None

    @property
    def straight(self) -> bool:
        """Whether it is simple and has no step inside the batch: then the streaming query makes the sink's rows. Spark
        splits the plan where a batch begins; before that it knows which columns are constant."""
        return self.simple and not self.per_batch and self.numbering == "none"

    @property
    def consumers(self) -> int:
        """The number of times that a batch is read."""
        return len(self.passes) + len(self.optional)


def make_plan(pipeline: Pipeline) -> PipelinePlan:
    spec = pipeline.spec
    all_processors = spec.processors
    placed = [
        Placed(p.id or f"processors[{i}]", p.placed(all_processors[:i], all_processors[i + 1 :]))
        for i, p in enumerate(all_processors)
    ]
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
        failures=bool(watermarks) or spec.source.can_fail() or any(p.can_fail() for p in spec.processors),
    )


def _delivery(pipeline: Pipeline) -> tuple[Delivery, str]:
    """The delivery and its reason: by position if a replay has the same rows in the same order, else by event id."""
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
    addresses = [address for sink in pipeline.spec.sinks for address in sink.addresses()]
    addresses += pipeline.spec.source.addresses()
    own = None if dlq.uri is None else RedisAddress(dlq.uri, dlq.password_file)
    address = own or next(iter(addresses), None)
    # Neither name may contain a colon, so two pipelines never share a default stream.
    stream = dlq.stream or f"{pipeline.tenant}:{pipeline.name}.dlq"
    return DeadLetterTarget(address, stream) if address else None


def describe(made: PipelinePlan) -> list[tuple[str, str]]:
    """The plan as pairs of a part and its description."""
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
        shared_with = [s.config.id for group in made.passes if sink in group for s in group if s is not sink]
        together = f", in one pass with {', '.join(shared_with)}" if shared_with else ""
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
    lines.append(("checkpoint", made.pipeline.checkpoint_identity))
    return lines


def order(made: PipelinePlan) -> str:
    """Whether events reach a sink in the order of their source, and why."""
    for placed in (*made.streaming, *made.per_batch):
        if placed.processor.reorders:
            return f"not kept: {placed.name} ({placed.processor.kind_name}) shuffles"
    if made.numbering != "none":
        return "not kept: rows with equal ids are numbered, which shuffles"
    stable = made.pipeline.spec.source.order()
    if stable is None:
        return "not kept: a batch is cut into tasks that write side by side; partitions: 1 in the source keeps it"
    return f"kept: {stable}, in every sink"


def before_the_batch(events: DataFrame, plan: PipelinePlan) -> DataFrame:
    """The source's events through stateless and stateful processors, with one watermark for all of them."""
    if plan.watermark_ms is not None:
        events = _with_watermark(events, plan.watermark_ms, plan.streaming[0].name)
    failures = plan.watermark_ms is not None or plan.pipeline.spec.source.can_fail()
    events = apply(events, plan.streaming, plan, batch_id=-1, failures=failures)
    return rows_and_times(events, plan) if plan.straight else events


def _with_watermark(events: DataFrame, delay_ms: int, stage: str) -> DataFrame:
    """A watermark that no single event can move beyond the present: what follows it would be dropped as late.

    A failed event takes no part in it. It passes the state with the batch's time, which is never late.
    """
    from pyspark.sql import functions as F

    now = F.current_timestamp()
    future = F.col("ts_ms") > F.unix_millis(now) + FUTURE_TOLERANCE_MS
    events = fail_where(events, future, stage=stage, reason=f"ts_ms is more than {FUTURE_TOLERANCE_MS} ms ahead")
    fine = F.col("error").isNull()
    own = F.coalesce(F.when(fine, F.timestamp_millis("ts_ms")), now)
    # Spark takes the watermark from the column as it is here. The operators behind it find their time column by its
    # metadata, so the column can hold other times from now on.
    marked = events.withColumn("event_time", F.when(fine, F.least(own, now)))
    marked = marked.withWatermark("event_time", f"{delay_ms} milliseconds")
    columns = [F.col(name) for name in events.columns]
    return marked.select(*columns, own.alias("event_time", metadata={_WATERMARK_DELAY: delay_ms}))


def rows_and_times(events: DataFrame, plan: PipelinePlan) -> DataFrame:
    """What the single pass of a simple plan writes, with the times of the events."""
    from pyspark.sql import functions as F

    return plan.gating[0].prepare(events, plan.pipeline.tenant, (F.col("ts_ms").alias(TIME),))


def inside_the_batch(frame: DataFrame, plan: PipelinePlan, batch_id: int) -> DataFrame:
    """A batch through what runs per batch. Ids are made unique first: sql and python may rely on them."""
    failures = plan.watermark_ms is not None or plan.pipeline.spec.source.can_fail()
    failures = failures or any(p.processor.can_fail() for p in plan.streaming)
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
        stage = ProcessorStage(each.name, plan.pipeline.tenant, batch_id, failures, quotes, plan.pipeline.name)
        events = _applied(each, events, stage)
        failures = failures or each.processor.can_fail()
    return events


def _applied(placed: Placed, events: DataFrame, stage: ProcessorStage) -> DataFrame:
    """Applies a processor. An error of Spark here is an error of the query: an unknown column, or invalid SQL."""
    from pyspark.errors import PySparkException

    try:
        return placed.processor.apply(events, stage)
    except PySparkException as error:
        raise ProcessorFailed(called(placed), cause(error)) from error
