"""One batch: processed once, given to all sinks side by side, dead letters aside, and only then committed.

Called by Spark on the driver, once per batch, again with the same rows after a crash. Returning commits the batch;
raising does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from millstream.pipelines.dead_letters import DeadLetterWriter
from millstream.pipelines.error_origin import short
from millstream.pipelines.errors import StopRequested
from millstream.pipelines.plan import PipelinePlan, config_of
from millstream.pipelines.retry import SinkRetry
from millstream.pipelines.run_context import RunContext
from millstream.pipelines.session import in_session
from millstream.pipelines.sinks import Sink, Write
from millstream.pipelines.sinks.sink import NOTHING, TIME, Delivered, text_bytes
from millstream.pipelines.stages import inside_the_batch, rows_and_times

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger("millstream.pipelines")


class BatchRunner:
    def __init__(self, plan: PipelinePlan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._again = False  # whether something in the batch at hand took more than one attempt
        self._processed = bool(plan.streaming or plan.per_batch)
        self._retry = SinkRetry(plan, context)
        self._dead = DeadLetterWriter(plan, context.addresses, context.observer)
        self._counts: dict[tuple[str, ...], list[Column]] = {}

    def run(self, frame: DataFrame, batch_id: int) -> None:
        began = time.monotonic()
        facts = self._simply(frame, batch_id) if self._plan.simple else self._fully(frame, batch_id)
        now = self._context.clock.now_ms()
        if facts["newest"] is not None:
            self._context.newest_ms = facts["newest"]
        ages = {f"{which}_age_ms": now - facts[which] for which in ("oldest", "newest") if facts[which] is not None}
        numbers = {"events": facts["events"], "failed": facts["failed"], "s": time.monotonic() - began}
        self._tell("pipeline.batch", batch=batch_id, **numbers, **ages)

    def _simply(self, frame: DataFrame, batch_id: int) -> dict[str, Any]:
        plan = self._plan
        rows = frame if plan.straight else rows_and_times(inside_the_batch(frame, plan, batch_id), plan)
        found = self._write(plan.gating, rows, batch_id)
        return {"events": found.rows, "failed": 0, "oldest": found.oldest, "newest": found.newest}

    def _fully(self, frame: DataFrame, batch_id: int) -> dict[str, Any]:
        from pyspark import StorageLevel
        from pyspark.sql import Observation

        events = inside_the_batch(frame, self._plan, batch_id)
        seen = Observation(f"events-{batch_id}-{id(events)}")
        events = events.observe(seen, *self._measured())
        partly = any(sink.looks for sink in self._plan.pipeline.spec.sinks)
        shared = self._plan.consumers > 1 or partly
        if shared:
            # Computed once, whoever asks first; a partition that does not fit in memory goes to disk.
            events = events.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            self._again = False
            if shared and (partly or self._processed):
                # A sink that looks at some rows only would leave the others unseen, dead letters too. And a step of
                # its own is the one place where the time of the processors can be told from that of the sinks.
                self._compute(events, batch_id)
            self._to_sinks(events, batch_id)
            # Spark reports what it observed when a job has failed, too: then some tasks' rows are missing in it, and
            # dead letters that nobody counted would never be buried.
            facts = self._counted(events) if self._again else seen.get
            if facts["failed"]:
                self._bury(events, batch_id, int(facts["failed"]))
        finally:
            if shared:
                events.unpersist()
        return facts

    def _counted(self, events: DataFrame) -> dict[str, Any]:
        [row] = events.agg(*self._measured()).collect()
        found: dict[str, Any] = row.asDict()
        return found

    def _compute(self, events: DataFrame, batch_id: int) -> None:
        """Reads and processes the batch, and keeps it. Where that fails and may yet succeed, the sinks' attempts, which
        are repeated, compute what is missing."""
        began = time.monotonic()
        try:
            events.count()
        except Exception as error:
            self._retry.refuse_processors_fault(error, sink_involved=False)
            log.warning("batch %d could not be computed: %s; the sinks' attempts try again", batch_id, short(error))
            self._again = True
            return
        if self._processed:
            self._tell("pipeline.processors", batch=batch_id, step="compute", s=time.monotonic() - began)

    def _measured(self) -> list[Column]:
        from pyspark.sql import functions as F

        fine = F.col("error").isNull()
        return [
            F.count(F.lit(1)).alias("events"),
            F.count_if(self._unfit()).alias("failed"),
            F.min(F.when(fine, F.col("ts_ms"))).alias("oldest"),
            F.max(F.when(fine, F.col("ts_ms"))).alias("newest"),
        ]

    def _unfit(self) -> Column:
        """Whether an event has failed, or has no place in one of the sinks."""
        from pyspark.sql import functions as F

        unfit = F.col("error").isNotNull() if self._plan.failures else F.lit(False)
        for sink in self._plan.pipeline.spec.sinks:
            missing = sink.misses(self._plan.pipeline.tenant)
            if missing is not None:
                unfit = unfit | F.coalesce(missing, F.lit(False))
        return unfit

    def _to_sinks(self, events: DataFrame, batch_id: int) -> None:
        from pyspark.sql import functions as F

        fine = events.where(F.col("error").isNull()) if self._plan.failures else events
        work: list[Callable[[], object]] = [
            partial(self._prepare_and_write, sinks, fine, batch_id) for sinks in self._plan.passes
        ]
        work += [partial(self._spool, sink, fine, batch_id) for sink in self._plan.optional]
        side_by_side(events.sparkSession, work)

    def _prepare_and_write(self, sinks: Sequence[Sink], fine: DataFrame, batch_id: int) -> None:
        self._write(sinks, sinks[0].prepare(fine, self._plan.pipeline.tenant), batch_id)

    def _write(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered:
        """Until each of the sinks, which are of one shape, has the batch. Answers what it was."""
        if len(sinks) == 1:
            return self._write_one(sinks[0], rows, batch_id)
        return self._in_one_pass(sinks, rows, batch_id) or self._one_by_one(sinks, rows, batch_id)

    def _in_one_pass(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered | None:
        """One attempt for all of them; None where it failed. Whoever got the batch gets nothing twice afterwards."""
        first, *others = [(sink, self._identity(sink, batch_id)) for sink in sinks]
        names = [config_of(sink).id for sink in sinks]
        began = time.monotonic()
        try:
            found = first[0].write_beside(rows, first[1], others)
        except Exception as error:
            self._retry.refuse_processors_fault(error, sink_involved=True)
            log.warning("sinks %s: one pass for all failed: %s; each tries alone", ", ".join(names), short(error))
            self._again = True
            return None
        for name in names:
            self._tell_written(name, found, batch_id, began)
        self._tell_processors(sinks[0], batch_id, began)
        return found

    def _one_by_one(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered:
        found: list[Delivered] = []
        work = [lambda sink=sink: found.append(self._write_one(sink, rows, batch_id)) for sink in sinks]
        side_by_side(rows.sparkSession, work)
        return found[0]

    def _write_one(self, sink: Sink, rows: DataFrame, batch_id: int) -> Delivered:
        """Until the sink has the batch; raises where trying on is useless, too late, or no longer wanted."""
        name = config_of(sink).id
        began = last = time.monotonic()
        found = NOTHING

        def attempt() -> None:
            nonlocal last, found
            last = time.monotonic()
            found = self._written(sink, rows, self._identity(sink, batch_id))

        if self._retry.until_taken(name, sink.probe, attempt) > 1:
            self._again = True
        self._tell_processors(sink, batch_id, last)
        self._tell_written(name, found, batch_id, began)
        return found

    def _written(self, sink: Sink, rows: DataFrame, write: Write) -> Delivered:
        """One attempt. For a sink that does not count Spark does, unless the sink may leave rows unread."""
        from pyspark.sql import Observation

        if sink.counts:
            return sink.write(rows, write) or NOTHING
        if sink.looks:
            sink.write(rows.drop(TIME), write)
            return NOTHING
        columns = tuple(rows.columns)
        if columns not in self._counts:  # dozens of calls into the JVM, so not for every batch
            self._counts[columns] = _counts(columns)
        seen = Observation(f"{write.sink}-{write.version}-{uuid4().hex}")
        sink.write(rows.observe(seen, *self._counts[columns]).drop(TIME), write)
        return Delivered(**seen.get)

    def _identity(self, sink: Sink, batch_id: int) -> Write:
        context = self._context
        return Write(context.application, batch_id, config_of(sink).id, self._plan.delivery, context.addresses)

    def _tell_written(self, name: str, found: Delivered, batch_id: int, began: float) -> None:
        numbers = {"rows": found.rows, "bytes": found.bytes, "s": time.monotonic() - began}
        self._tell("pipeline.sink", sink=name, batch=batch_id, **numbers)

    def _tell_processors(self, sink: Sink, batch_id: int, began: float) -> None:
        if self._processed and self._plan.consumers == 1 and not sink.looks:
            # Spark runs processors and sink as one: no clock can tell them apart.
            self._tell("pipeline.processors", batch=batch_id, step="compute_and_write", s=time.monotonic() - began)

    def _spool(self, sink: Sink, fine: DataFrame, batch_id: int) -> None:
        config = config_of(sink)
        spool = self._context.spools[config.id]
        while spool.full():
            if config.spool.overflow == "drop_oldest":
                lost = spool.drop_oldest()
                log.error("sink %s: the spool is full; batch %s was dropped and will not be delivered", config.id, lost)
                self._tell("pipeline.spool_dropped", sink=config.id, batch=lost)
            elif self._context.stopping.wait(0.2):
                raise StopRequested(f"asked to stop while the spool of sink {config.id!r} was full")
        rows = sink.prepare(fine, self._plan.pipeline.tenant)
        stored = spool.put(batch_id, lambda path: rows.write.mode("overwrite").parquet(path))
        self._tell("pipeline.spooled", sink=config.id, batch=batch_id, stored=stored, waiting=spool.count())

    def _bury(self, events: DataFrame, batch_id: int, expected: int) -> None:
        from pyspark.sql import functions as F

        tenant = self._plan.pipeline.tenant
        fine = events.where(F.col("error").isNull())
        lost = [events.where(F.col("error").isNotNull())] if self._plan.failures else []
        for sink in self._plan.pipeline.spec.sinks:
            unroutable = sink.unroutable(fine, tenant)
            lost += [] if unroutable is None else [unroutable]
        everything = lost[0]
        for more in lost[1:]:
            everything = everything.unionByName(more)
        write = Write(
            self._context.application, batch_id, "dead-letters", "exactly_once_by_event_id", self._context.addresses
        )
        self._retry.until_taken("dead-letters", self._dead.probe, lambda: self._dead.write(everything, write, expected))

    def _tell(self, fact: str, **facts: Any) -> None:
        self._context.observer(fact, pipeline=self._plan.pipeline.name, **facts)


def _counts(columns: Collection[str]) -> list[Column]:
    from pyspark.sql import functions as F

    counts = [F.count(F.lit(1)).alias("rows"), text_bytes(columns).alias("bytes")]
    if TIME in columns:
        counts += [F.min(TIME).alias("oldest"), F.max(TIME).alias("newest")]
    return counts


def side_by_side(session: SparkSession, work: Sequence[Callable[[], object]]) -> None:
    """Runs all of it, each in a thread of its own; raises the first error when all have ended."""
    if len(work) == 1:
        work[0]()
        return
    errors: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # whatever it is, the batch must not be committed
            errors.append(error)

    threads = [
        threading.Thread(target=in_session(session, partial(guarded, one)), name="millstream-sink") for one in work
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, StopRequested)), errors[0])
