"""One batch: processed once, written to all sinks in parallel, failed events to the dead letters, then committed.

Spark calls it on the driver, once per batch, and again with the same rows after a crash. If it returns, Spark commits
the batch; if it raises, Spark does not.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from millstream.pipelines.dead_letters import DeadLetterWriter
from millstream.pipelines.envelope_reader import too_large
from millstream.pipelines.errors import SinkFailed, StopRequested, is_disk_full, is_transient
from millstream.pipelines.events import EXCERPT_LENGTH, MAX_ENTRY_BYTES, REFUSED, event_frame
from millstream.pipelines.plan import PipelinePlan, inside_the_batch, rows_and_times
from millstream.pipelines.run_context import RunContext, SinkRetry
from millstream.pipelines.session import in_session
from millstream.pipelines.sinks import Sink, Write
from millstream.pipelines.sinks.sink import NOTHING, TIME, text_bytes
from millstream.spark.sink_options import Delivered
from millstream.storage.location import for_spark

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.sink_queue import SinkQueue

log = logging.getLogger("millstream.pipelines")
_OBSERVED_S = 30.0
"""How long to wait for the metrics that Spark observed during a write, which another of its threads reports."""


class BatchRunner:
    def __init__(self, plan: PipelinePlan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._again = False  # whether a part of the current batch took more than one attempt
        self._processed = bool(plan.streaming or plan.per_batch)
        self._retry = SinkRetry(plan, context)
        self._dead = DeadLetterWriter(plan, context.secrets, context.observer)
        self._counts: dict[tuple[str, ...], list[Column]] = {}

    def run(self, frame: DataFrame, batch_id: int) -> int:
        """Returns the number of events when the batch may be committed."""
        began = time.monotonic()
        facts = self._simply(frame, batch_id) if self._plan.simple else self._fully(frame, batch_id)
        self._retry.verify_lease()
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
        failed = 0
        try:
            delivered = self._write(plan.gating, rows, batch_id)
        except SinkFailed as error:
            large = _too_large(rows)
            if "PayloadTooLarge" not in str(error) or large is None or plan.dead_letters is None:
                raise
            log.warning("pipeline %s: %s Its events become dead letters.", plan.pipeline.name, error)
            delivered = self._write(plan.gating, rows.where(~large), batch_id)
            failed = self._dead_letter_rows(rows.where(large), batch_id)
        return {
            "events": delivered.rows + failed,
            "failed": failed,
            "oldest": delivered.oldest,
            "newest": delivered.newest,
        }

    def _dead_letter_rows(self, rows: DataFrame, batch_id: int) -> int:
        """Dead-letters rows that are too large for an entry. Rows of a database have no limit."""
        from pyspark.sql import functions as F

        document = F.col("event" if "event" in rows.columns else "value")
        columns = {
            "id": F.col("id"),
            "key": F.substring("key", 1, EXCERPT_LENGTH),
            "payload": F.substring(document, 1, EXCERPT_LENGTH),
            "error": F.concat(F.lit(REFUSED), too_large(F.octet_length(document))),
            "stage": F.lit("source"),
        }
        lost = event_frame(rows, columns)
        expected = lost.count()
        if expected:
            self._write_dead_letters(lost, batch_id, expected)
        return expected

    def _fully(self, frame: DataFrame, batch_id: int) -> dict[str, Any]:
        from pyspark import StorageLevel
        from pyspark.sql import Observation

        events = inside_the_batch(frame, self._plan, batch_id)
        observation = Observation(f"events-{batch_id}-{id(events)}")
        events = events.observe(observation, *self._measured())
        partly = any(sink.looks for sink in self._plan.pipeline.spec.sinks)
        shared = self._plan.consumers > 1 or partly
        if shared:
            # Computed once, for all sinks; a partition that does not fit in memory goes to disk.
            events = events.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            self._again = False
            if shared and (partly or self._processed):
                # A sink that reads only some rows would leave dead letters among the others undetected. And only in a
                # separate step can the time of the processors be measured apart from that of the sinks.
                self._compute(events, batch_id)
            try:
                self._to_sinks(events, batch_id)
            except SinkFailed as error:
                if not self._learned(error, events):
                    raise
                # Rows that the sinks have already are not added again, so all rows may be written once more.
                self._again = True
                self._to_sinks(events, batch_id)
            # Spark also reports an observation when a job has failed. Then rows of some tasks are missing in it, and
            # failed events that were not counted would not be dead-lettered.
            facts = (None if self._again else _observed(observation)) or self._counted(events)
            if facts["failed"]:
                self._dead_letter(events, batch_id, int(facts["failed"]))
        finally:
            if shared:
                events.unpersist()
        return facts

    def _learned(self, error: SinkFailed, events: DataFrame) -> bool:
        """Whether the sink that refused the batch permanently can now name the events that it refused."""
        tenant = self._plan.pipeline.tenant
        learned = [sink.learn_from(error, events, tenant) for sink in self._plan.gating]
        if not any(learned):
            return False
        log.warning("pipeline %s: %s Its events become dead letters.", self._plan.pipeline.name, error)
        return True

    def _counted(self, events: DataFrame) -> dict[str, Any]:
        [row] = events.agg(*self._measured()).collect()
        counts: dict[str, Any] = row.asDict()
        return counts

    def _compute(self, events: DataFrame, batch_id: int) -> None:
        """Reads and processes the batch, and keeps the result. After a transient error the attempts of the sinks, which
        are repeated, compute the missing partitions."""
        began = time.monotonic()
        try:
            events.count()
        except Exception as error:  # Spark's and py4j's errors have no common class
            self._retry.refuse_processors_fault(error, sink_involved=False)
            log.warning(
                "batch %d could not be computed: %s; the sinks' attempts try again", batch_id, self._retry.why(error)
            )
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
        """Whether an event has failed, or one of the sinks has no stream for it."""
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
        work += [partial(self._queue, sink, fine, batch_id) for sink in self._plan.optional]
        side_by_side(events.sparkSession, work)

    def _prepare_and_write(self, sinks: Sequence[Sink], fine: DataFrame, batch_id: int) -> None:
        self._write(sinks, sinks[0].prepare(fine, self._plan.pipeline.tenant), batch_id)

    def _write(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered:
        """Returns when each of the sinks, which have one shape, has the batch."""
        if len(sinks) == 1:
            return self._write_one(sinks[0], rows, batch_id)
        return self._in_one_pass(sinks, rows, batch_id) or self._one_by_one(sinks, rows, batch_id)

    def _in_one_pass(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered | None:
        """One attempt for all sinks; None if it failed. A sink that has the batch adds nothing in a later attempt."""
        first, *further = [(sink, self._identity(sink, batch_id)) for sink in sinks]
        names = [sink.config.id for sink in sinks]
        began = time.monotonic()
        try:
            delivered = first[0].write_beside(rows, first[1], further)
        except Exception as error:  # Spark's and py4j's errors have no common class
            self._retry.refuse_processors_fault(error, sink_involved=True)
            log.warning(
                "sinks %s: one pass for all failed: %s; each tries alone", ", ".join(names), self._retry.why(error)
            )
            self._again = True
            return None
        for name in names:
            self._tell_written(name, delivered.of(name), batch_id, began)
        self._tell_processors(sinks[0], batch_id, began)
        return delivered

    def _one_by_one(self, sinks: Sequence[Sink], rows: DataFrame, batch_id: int) -> Delivered:
        delivered: list[Delivered] = []
        work = [lambda sink=sink: delivered.append(self._write_one(sink, rows, batch_id)) for sink in sinks]
        side_by_side(rows.sparkSession, work)
        return delivered[0]

    def _write_one(self, sink: Sink, rows: DataFrame, batch_id: int) -> Delivered:
        """Returns when the sink has the batch. Raises after a permanent error, after the deadline, or on a stop."""
        name = sink.config.id
        began = last = time.monotonic()
        delivered = NOTHING

        def attempt() -> None:
            nonlocal last, delivered
            last = time.monotonic()
            delivered = self._written(sink, rows, self._identity(sink, batch_id))

        if self._retry.until_taken(name, sink.probe, attempt) > 1:
            self._again = True
        self._tell_processors(sink, batch_id, last)
        self._tell_written(name, delivered, batch_id, began)
        return delivered

    def _written(self, sink: Sink, rows: DataFrame, write: Write) -> Delivered:
        """One attempt. If the sink does not count its rows, Spark does, unless the sink may leave rows unread."""
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
        observation = Observation(f"{write.sink}-{write.version}-{uuid4().hex}")
        sink.write(rows.observe(observation, *counts).drop(TIME), write)
        return Delivered(**(_observed(observation) or rows.agg(*counts).collect()[0].asDict()))

    def _identity(self, sink: Sink, batch_id: int) -> Write:
        context = self._context
        plan = self._plan
        return Write(
            *(context.application, batch_id, sink.config.id, plan.delivery, context.secrets, context.fence),
            unobserved=plan.simple,
        )

    def _tell_written(self, name: str, delivered: Delivered, batch_id: int, began: float) -> None:
        self._context.unready.pop(name, None)
        self._tell("pipeline.sink", sink=name, batch=batch_id, **delivered.numbers(), s=time.monotonic() - began)

    def _tell_processors(self, sink: Sink, batch_id: int, began: float) -> None:
        if self._processed and self._plan.consumers == 1 and not sink.looks:
            # Spark runs processors and sink as one job, so their times cannot be measured apart.
            self._tell("pipeline.processors", batch=batch_id, step="compute_and_write", s=time.monotonic() - began)

    def _queue(self, sink: Sink, fine: DataFrame, batch_id: int) -> None:
        """Puts the batch into the sink's queue. An optional sink has this one way to stop the others: a store that
        does not answer, which Spark needs for its own checkpoint too."""
        self._until_store_answers(sink, partial(self._put, sink, fine, batch_id))

    def _until_store_answers(self, sink: Sink, attempt: Callable[[], None]) -> None:
        retry, began, tries = self._plan.pipeline.spec.retry, time.monotonic(), 0
        while True:
            try:
                attempt()
                return
            except Exception as error:  # see ``is_transient``
                tries += 1
                wait_ms = retry.backoff.delay_ms(tries, random.random())  # noqa: S311  # jitter, no secret
                if not is_transient(error) or retry.over((time.monotonic() - began) * 1000 + wait_ms):
                    raise
                log.warning(
                    "queue of sink %s: attempt %d failed: %s; next in %d ms",
                    *(sink.config.id, tries, self._retry.why(error), wait_ms),
                )
            if self._context.stopping.wait(wait_ms / 1000):
                raise StopRequested(f"asked to stop while the queue of sink {sink.config.id!r} did not answer")

    def _put(self, sink: Sink, fine: DataFrame, batch_id: int) -> None:
        config = sink.config
        queue = self._context.queues[config.id]
        while queue.full():
            if not self._made_room(sink, queue):
                break  # the queue is empty, and the disk is full of other data: the batch may still fit
        rows = sink.prepare(fine, self._plan.pipeline.tenant)
        while True:
            try:
                stored = queue.put(batch_id, partial(self._store, rows))
                break
            except Exception as error:  # see ``is_disk_full``
                if not is_disk_full(error):
                    raise
                # A Parquet writer that cannot write its last bytes does not close its file. The space of the deleted
                # file becomes free when the JVM collects the writer.
                if (jvm := fine.sparkSession._jvm) is not None:
                    jvm.System.gc()
                if not self._made_room(sink, queue):
                    # An optional sink never stops the others: its batch is dropped, as those before it were.
                    self._tell_dropped(sink, batch_id, "the checkpoint's disk or store is full")
                    stored = False
                    break
        # The batch may have taken the reserved space, which Spark needs next, to commit the batch.
        while queue.took_the_reserve() and config.queue.overflow != "block" and self._made_room(sink, queue):
            pass
        self._tell("pipeline.queued", sink=config.id, batch=batch_id, stored=stored, waiting=queue.count())

    def _made_room(self, sink: Sink, queue: SinkQueue) -> bool:
        """Drops the oldest batch, or waits if the spec says so; false if the queue is empty."""
        config = sink.config
        if config.queue.overflow == "block":
            if self._context.stopping.wait(0.2):
                raise StopRequested(f"asked to stop while the queue of sink {config.id!r} was full")
            return True
        lost = queue.drop_oldest()
        if lost is not None:
            self._tell_dropped(sink, lost, "its queue is full")
        return lost is not None

    def _tell_dropped(self, sink: Sink, batch_id: int, why: str) -> None:
        name = sink.config.id
        log.error("sink %s: %s; batch %s was dropped and will not be delivered", name, why, batch_id)
        self._tell("pipeline.queue_dropped", sink=name, batch=batch_id)

    def _store(self, rows: DataFrame, uri: str) -> int:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        observation = Observation(f"queued-{uuid4().hex}")
        rows.observe(observation, F.count(F.lit(1)).alias("rows")).write.mode("overwrite").parquet(for_spark(uri))
        self._context.verify_lease()  # before the batch gets its name in the queue
        return int(observation.get["rows"])

    def _dead_letter(self, events: DataFrame, batch_id: int, expected: int) -> None:
        from pyspark.sql import functions as F

        tenant = self._plan.pipeline.tenant
        fine = events.where(F.col("error").isNull())
        lost = [events.where(F.col("error").isNotNull())] if self._plan.failures else []
        for sink in self._plan.pipeline.spec.sinks:
            unroutable = sink.unroutable(fine, tenant)
            lost += [] if unroutable is None else [unroutable]
        everything = lost[0]
        for frame in lost[1:]:
            everything = everything.unionByName(frame)
        self._write_dead_letters(everything, batch_id, expected)

    def _write_dead_letters(self, lost: DataFrame, batch_id: int, expected: int) -> None:
        context = self._context
        write = Write(
            *(context.application, batch_id, "dead-letters", "exactly_once_by_event_id"),
            *(context.secrets, context.fence),
        )
        self._retry.until_taken("dead-letters", self._dead.probe, lambda: self._dead.write(lost, write, expected))

    def _tell(self, fact: str, **facts: Any) -> None:
        self._context.observer(fact, pipeline=self._plan.pipeline.name, **facts)


def _too_large(rows: DataFrame) -> Column | None:
    """Whether a sink's row is too large for an entry; None if the rows are not a Redis sink's."""
    from pyspark.sql import functions as F

    texts = [name for name in ("event", "value", "key", "headers", "id") if name in rows.columns]
    if not {"event", "value"} & set(texts) or "id" not in texts or "key" not in texts:
        return None
    size = F.lit(0)
    for name in texts:
        size = size + F.coalesce(F.octet_length(name), F.lit(0))
    return size > MAX_ENTRY_BYTES


def _observed(observation: Any) -> dict[str, Any] | None:
    """The metrics that Spark observed in a write that has returned; None if there are none. A sink that has the batch
    already (Delta) does not read it, and then the observation never completes."""
    until = time.monotonic() + _OBSERVED_S
    while not observation._jo.future().isCompleted():
        if time.monotonic() > until:
            return None
        time.sleep(0.005)
    values: dict[str, Any] = observation.get
    return values


def _counts(columns: Collection[str]) -> list[Column]:
    from pyspark.sql import functions as F

    counts = [F.count(F.lit(1)).alias("rows"), text_bytes(columns).alias("bytes")]
    if TIME in columns:
        counts += [F.min(TIME).alias("oldest"), F.max(TIME).alias("newest")]
    return counts


def side_by_side(session: SparkSession, tasks: Sequence[Callable[[], object]]) -> None:
    """Runs each task in its own thread; raises the first error when all have ended."""
    if len(tasks) == 1:
        tasks[0]()
        return
    errors: list[BaseException] = []

    def guarded(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # after any error the batch must not be committed
            errors.append(error)

    threads = [
        # Daemon threads: a sink that hangs must not keep the process from ending.
        threading.Thread(target=in_session(session, partial(guarded, task)), name="millstream-sink", daemon=True)
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, StopRequested)), errors[0])
