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
from millstream.pipelines.errors import StopRequested, is_disk_full, short
from millstream.pipelines.plan import PipelinePlan, inside_the_batch, rows_and_times
from millstream.pipelines.run_context import RunContext, SinkRetry
from millstream.pipelines.session import in_session
from millstream.pipelines.sinks import Sink, Write
from millstream.pipelines.sinks.sink import NOTHING, TIME, text_bytes
from millstream.spark import Delivered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.spool import Spool

log = logging.getLogger("millstream.pipelines")
_OBSERVED_S = 5.0
"""Spark tells what it observed in a thread of its own, soon after."""


class BatchRunner:
    def __init__(self, plan: PipelinePlan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._again = False  # whether something in the batch at hand took more than one attempt
        self._processed = bool(plan.streaming or plan.per_batch)
        self._retry = SinkRetry(plan, context)
        self._dead = DeadLetterWriter(plan, context.secrets, context.observer)
        self._counts: dict[tuple[str, ...], list[Column]] = {}

    def run(self, frame: DataFrame, batch_id: int) -> int:
        """Returns when the batch may be committed; answers how many events it had."""
        began = time.monotonic()
        facts = self._simply(frame, batch_id) if self._plan.simple else self._fully(frame, batch_id)
        now = self._context.clock.now_ms()
        if facts["newest"] is not None:
            self._context.newest_ms = facts["newest"]
        ages = {f"{which}_age_ms": now - facts[which] for which in ("oldest", "newest") if facts[which] is not None}
        numbers = {"events": facts["events"], "failed": facts["failed"], "s": time.monotonic() - began}
        self._tell("pipeline.batch", batch=batch_id, **numbers, **ages)
        return int(facts["events"])

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
            facts = (None if self._again else _observed(seen)) or self._counted(events)
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
        names = [sink.config.id for sink in sinks]
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
        name = sink.config.id
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
        counts = self._counts[columns]
        seen = Observation(f"{write.sink}-{write.version}-{uuid4().hex}")
        sink.write(rows.observe(seen, *counts).drop(TIME), write)
        return Delivered(**(_observed(seen) or rows.agg(*counts).collect()[0].asDict()))

    def _identity(self, sink: Sink, batch_id: int) -> Write:
        context = self._context
        return Write(context.application, batch_id, sink.config.id, self._plan.delivery, context.secrets)

    def _tell_written(self, name: str, found: Delivered, batch_id: int, began: float) -> None:
        numbers = {"rows": found.rows, "bytes": found.bytes, "s": time.monotonic() - began}
        self._tell("pipeline.sink", sink=name, batch=batch_id, dropped=found.dropped, **numbers)

    def _tell_processors(self, sink: Sink, batch_id: int, began: float) -> None:
        if self._processed and self._plan.consumers == 1 and not sink.looks:
            # Spark runs processors and sink as one: no clock can tell them apart.
            self._tell("pipeline.processors", batch=batch_id, step="compute_and_write", s=time.monotonic() - began)

    def _spool(self, sink: Sink, fine: DataFrame, batch_id: int) -> None:
        config = sink.config
        spool = self._context.spools[config.id]
        while spool.full():
            if not self._made_room(sink, spool):
                break  # nothing waits, and the disk is full by others: the batch may yet fit
        rows = sink.prepare(fine, self._plan.pipeline.tenant)
        while True:
            try:
                stored = spool.put(batch_id, partial(self._onto_disk, rows))
                break
            except Exception as error:
                if not is_disk_full(error):
                    raise
                if not self._made_room(sink, spool):
                    # An optional sink never stops the others: its batch is given up, as those before it were.
                    self._tell_dropped(sink, batch_id, "the disk of the checkpoint is full")
                    stored = False
                    break
        # What was written may have taken the reserve: Spark commits the batch on the same disk, right behind this.
        while spool.took_the_reserve() and config.spool.overflow != "block" and self._made_room(sink, spool):
            pass
        self._tell("pipeline.spooled", sink=config.id, batch=batch_id, stored=stored, waiting=spool.count())

    def _made_room(self, sink: Sink, spool: Spool) -> bool:
        """Gives up the oldest batch that waits, or waits itself where the spec says so; false where none is left."""
        config = sink.config
        if config.spool.overflow == "block":
            if self._context.stopping.wait(0.2):
                raise StopRequested(f"asked to stop while the spool of sink {config.id!r} was full")
            return True
        try:
            lost = spool.drop_oldest()
        except FileNotFoundError:
            return True  # the sink has it: there is room
        if lost is not None:
            self._tell_dropped(sink, lost, "the spool is full")
        return lost is not None

    def _tell_dropped(self, sink: Sink, batch_id: int, why: str) -> None:
        name = sink.config.id
        log.error("sink %s: %s; batch %s was dropped and will not be delivered", name, why, batch_id)
        self._tell("pipeline.spool_dropped", sink=name, batch=batch_id)

    def _onto_disk(self, rows: DataFrame, path: str) -> int:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        seen = Observation(f"spooled-{uuid4().hex}")
        rows.observe(seen, F.count(F.lit(1)).alias("rows")).write.mode("overwrite").parquet(path)
        return int(seen.get["rows"])

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
            self._context.application, batch_id, "dead-letters", "exactly_once_by_event_id", self._context.secrets
        )
        self._retry.until_taken("dead-letters", self._dead.probe, lambda: self._dead.write(everything, write, expected))

    def _tell(self, fact: str, **facts: Any) -> None:
        self._context.observer(fact, pipeline=self._plan.pipeline.name, **facts)


def _observed(seen: Any) -> dict[str, Any] | None:
    """What Spark observed of a write that has returned; None where it observed nothing: a sink that has a batch already
    (Delta) skips it without a look, and asking the observation would wait for ever."""
    until = time.monotonic() + _OBSERVED_S
    while not seen._jo.future().isCompleted():
        if time.monotonic() > until:
            return None
        time.sleep(0.005)
    found: dict[str, Any] = seen.get
    return found


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
