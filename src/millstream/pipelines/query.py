"""One running pipeline: its streaming query, its deliverers, its state. Pausing stops it between batches; resuming
starts it again from the checkpoint."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.model import Observer, quiet
from millstream.pipelines.batch import BatchRunner
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import (
    BatchStillRuns,
    LeaseLost,
    QueryVanished,
    SinkUnknown,
    SourceFailed,
    StopRequested,
    is_transient,
    short,
    without_values,
)
from millstream.pipelines.java import gateway
from millstream.pipelines.plan import PipelinePlan, before_the_batch
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.run_context import Gate, RunContext
from millstream.pipelines.sink_queue import STOP_S, Deliverer, SinkQueue
from millstream.pipelines.sources import Opening
from millstream.pipelines.status import LagWatch, PipelineStatus, SinkWatch, SlotWatch, State, chosen
from millstream.storage import StorageUnavailable, hand_over

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from millstream.pipelines.run_lease import RunLease

log = logging.getLogger("millstream.pipelines")

_COMMIT_S = 10.0
_RESTARTS = 3
_DRAIN_S = 60.0
_QUERY_STOPS_S = 10
"""How long Spark waits for its query's thread, which may hang in a sink. Its own default is to wait without end."""


class PipelineRun:
    """A pipeline that can be started, paused and stopped. Thread-safe."""

    def __init__(
        self,
        session: SparkSession,
        plan: PipelinePlan,
        *,
        once: bool = False,
        secrets: SecretFiles | None = None,
        observer: Observer = quiet,
        unready: dict[str, str] | None = None,
        end_exhausted: bool = False,
        lease: RunLease | None = None,
    ) -> None:
        """``unready``: sinks that could not be reached before the start, and how that is shown until they answer.
        ``end_exhausted``: finish when the source can have no further rows. ``lease``: without it, another process must
        not run the pipeline."""
        # A separate session, so that views, settings and data sources of pipelines do not mix.
        self._session = session.newSession()
        # A document may contain a name twice. The last one counts, as in most parsers; an error would stop everything.
        self._session.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
        # A batch that several sinks share is cached for seconds: compression costs more time than the memory is worth.
        self._session.conf.set("spark.sql.inMemoryColumnarStorage.compressed", "false")
        self._session.conf.set("spark.sql.streaming.stopTimeout", f"{_QUERY_STOPS_S}s")
        self.plan = plan
        self._once = once
        self._observer = observer
        self._secrets = secrets or SecretFiles()
        self._lease = lease
        if lease is not None:
            lease.on_lost = self.request_stop
        self.checkpoint = Checkpoint.of(plan.pipeline)
        self._lock = threading.RLock()
        self._state: State = "new"
        self._error: BaseException | None = None
        self._query: StreamingQuery | None = None
        self._context: RunContext | None = None
        self._gate = Gate()
        self._stop_requested = False
        self._deliverers: list[Deliverer] = []
        self._unready = unready or {}
        self._end_exhausted = end_exhausted
        self._last_progress: dict[str, Any] = {}
        self.resumed_after: int | None = None
        """The last committed batch of the checkpoint at the start; None if it started from the beginning."""
        self._lag: LagWatch | None = None
        self._sinks_watch: SinkWatch | None = None
        self._slot: SlotWatch | None = None
        self._outage: _SourceOutage | None = None
        self._counted: tuple[int, int] | None = None
        self._restarts = 0

    @property
    def name(self) -> str:
        return self.plan.pipeline.name

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def start(self) -> None:
        """Starts, or continues from the checkpoint, also after a failure. Raises CheckpointRefused if the spec does not
        fit it."""
        with self._lock:
            if self._state == "running":
                return
            if (hanging := self._gate.inside) is not None:
                raise BatchStillRuns(self.name, hanging)
            self._refuse_lost_lease()
            self.resumed_after = self.checkpoint.last_committed()
            application = self.checkpoint.open(self.plan)
            self._gate, self._error, self._outage, self._counted = Gate(), None, None, None
            context = self._context = self._run_context(application)
            before = {deliverer.name: deliverer for deliverer in self._deliverers}
            self._deliverers = [
                Deliverer(
                    self._session, self.plan, sink, context.queues[sink.config.id], context, before.get(sink.config.id)
                )
                for sink in self.plan.optional
            ]
            self._query = self._start_query(context)
            for deliverer in self._deliverers:
                deliverer.start()
            behind = partial(self.plan.pipeline.spec.source.behind, self._opening())
            self._lag = LagWatch(self.name, behind, self.checkpoint, self._gate, context)
            self._lag.start()
            if self._unready:
                self._sinks_watch = SinkWatch(self.plan, self._unready)
                self._sinks_watch.start()
            self._watch_slot()
            self._become("running")

    def beginning(self) -> str:
        """Describes where this run began."""
        if self.resumed_after is None:
            return f"starts from the beginning of its source; its checkpoint is {self.checkpoint.location}"
        return f"continues after batch {self.resumed_after} of its checkpoint {self.checkpoint.location}"

    def request_stop(self) -> None:
        """Lets no further batch begin. Does not wait; ``stop`` does."""
        self._stop_requested = True
        self._gate.request_close()

    def end_drain(self) -> None:
        """Ends the wait for optional sinks after a finished run. Takes no lock: signal handlers may call it."""
        self._stop_requested = True

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Stops after the current batch is committed. If a sink is being retried, its batch is replayed later.

        A batch that takes longer than ``timeout_s`` is interrupted, and replayed at the next start.
        """
        self._halt("stopped", timeout_s)

    def pause(self, timeout_s: float = STOP_S) -> None:
        """Like ``stop``; ``resume`` continues from the checkpoint."""
        self._halt("paused", timeout_s)

    def resume(self) -> None:
        with self._lock:
            if self._state == "paused":
                self.start()

    def start_sink(self, name: str) -> None:
        """Restarts an optional sink that failed permanently."""
        for deliverer in self._deliverers:
            if deliverer.name == name:
                deliverer.start_again()
                return
        names = ", ".join(deliverer.name for deliverer in self._deliverers) or "none"
        raise SinkUnknown(f"pipeline {self.name!r} runs no optional sink {name!r}; there are: {names}", sink=name)

    def check(self) -> State:
        """Returns the state, after handling a query that has ended by itself."""
        with self._lock:
            query = self._query
            if self._state != "running" or query is None:
                return self._state
            if self._lease is not None and self._lease.lost is not None:
                self._end_fenced(query, self._lease.lost)
            elif self._outage is not None and self._outage.over_at is not None:
                self._try_source_again()
            elif not query.isActive:
                self._ended_by_itself(query)
            elif self._outage is not None and (self._gate.last_done is not None or query.lastProgress is not None):
                self._outage = None  # the source was read, so a later failure is another outage
            elif self._end_exhausted and not self._once and self._is_exhausted():
                self._stop_running(query, "finished", STOP_S, drain_s=_DRAIN_S)
            return self._state

    def _is_exhausted(self) -> bool:
        """Whether the last row of a finite source is committed. State over batches may still have rows to come."""
        source = self.plan.pipeline.spec.source
        if not source.is_finite() or self.plan.watermark_ms is not None:
            return False
        logged = self.checkpoint.recent()
        if logged.committed is None or logged.in_flight is not None:
            return False
        try:
            ends = self.checkpoint.ends(logged.committed)
        except StorageUnavailable:
            return False  # examined again at the next check
        return ends is not None and len(ends) > 0 and source.is_exhausted(ends[0])

    def status(self) -> PipelineStatus:
        query, context, logged = self._query, self._context, self.checkpoint.recent()
        running = query is not None and self._state == "running"
        progress = chosen(query.lastProgress, self._counted) if running and query is not None else self._last_progress
        progress |= self._lag.to_status() if self._lag is not None else {}
        progress |= self._slot.to_status() if self._slot is not None else {}
        troubles = {} if context is None else context.troubles
        sinks = {sink.config.id: "ok" for sink in self.plan.gating} | troubles
        sinks |= {deliverer.name: deliverer.state for deliverer in self._deliverers}
        sinks |= {name: state for name, state in dict(self._unready).items() if sinks.get(name) == "ok"}
        return PipelineStatus(
            name=self.name,
            tenant=self.plan.pipeline.tenant,
            state=self._state,
            error=str(self._error) if self._error is not None and self._state == "failed" else None,
            batch=logged.committed,
            in_flight=logged.in_flight,
            checkpoint=self.checkpoint.location,
            source="ok" if self._outage is None else "retrying",
            sinks=sinks,
            waiting={} if context is None else {name: queue.count() for name, queue in context.queues.items()},
            progress=progress,
            holder=self._holder(),
        )

    def _holder(self) -> dict[str, Any] | None:
        if self._lease is None or self._lease.lost is not None:
            return None
        return self._lease.holder.to_status()

    def _start_query(self, context: RunContext) -> StreamingQuery:
        source, gate = self.plan.pipeline.spec.source, self._gate
        runner = BatchRunner(self.plan, context)
        events = before_the_batch(source.open(self._session, self._opening()), self.plan)

        def on_batch(frame: DataFrame, batch_id: int) -> None:
            try:
                with gate.batch(batch_id):
                    self._refuse_lost_lease()
                    if self._lease is not None:
                        self._lease.last_batch = batch_id
                    self._counted = (batch_id, runner.run(frame, batch_id))
            except BaseException as error:
                # Spark passes on only a text, so the error itself is stored here. A lost lease stops the batch, and
                # stays the reason.
                if not isinstance(self._error, LeaseLost):
                    self._error = error
                raise

        writer = events.writeStream.queryName(self.name).option("checkpointLocation", self.checkpoint.spark)
        if self._once:
            writer = writer.trigger(availableNow=True)
        elif self.plan.pipeline.spec.batch.max_ms:
            writer = writer.trigger(processingTime=f"{self.plan.pipeline.spec.batch.max_ms} milliseconds")
        return writer.foreachBatch(on_batch).start()

    def _ended_by_itself(self, query: StreamingQuery) -> None:
        failure = query.exception()
        if failure is not None and self._lease is not None:
            if (lost := self._lease.check()) is not None:
                self._end_fenced(query, lost)
                return
            if self._error is None and "CONCURRENT_STREAM_LOG_UPDATE" in str(failure) and self._restarts < _RESTARTS:
                # A process that lost the lease planned or committed this batch at the same moment. Both are true
                # (decision 20), so the query continues from what the checkpoint holds now.
                self._restarts += 1
                log.warning("pipeline %s: a process without the lease wrote to the checkpoint; restarting", self.name)
                self._start_query_again()
                return
        try:
            done = failure is None and self.checkpoint.in_flight() is None
        except StorageUnavailable as error:
            self._wait_for_source(error)
            return
        if done and self._once:
            self._end("finished", drain_s=_DRAIN_S)
        elif isinstance(self._error, StopRequested):
            self._end("stopped")
        elif failure is not None and self._error is None and is_transient(failure):
            self._wait_for_source(failure)
        else:
            # A query that ended without an error, but with work left, was stopped from outside.
            public_error: Exception | None = failure
            if failure is not None and self.plan.hidden:
                public_error = SourceFailed(1, without_values(failure))  # Spark's text may quote a masked value
            self._error = self._error or public_error or QueryVanished()
            self._end("failed")

    def _refuse_lost_lease(self) -> None:
        if self._lease is not None and (lost := self._lease.check()) is not None:
            raise lost

    def _end_fenced(self, query: StreamingQuery, lost: LeaseLost) -> None:
        """Another process runs the pipeline now: end without committing, and without acknowledging to the source."""
        self._error = lost
        self._gate.request_close()
        self._stop_query(query)
        self._end("failed", timeout_s=1.0, tell_source=False)

    def _wait_for_source(self, failure: BaseException) -> None:
        """Schedules a restart: the query ended while planning a batch, because the source could not be reached."""
        retry = self.plan.pipeline.spec.retry
        outage = self._outage = self._outage or _SourceOutage()
        outage.tries += 1
        why = without_values(failure) if self.plan.hidden else short(failure)
        self._observer("pipeline.source_error", pipeline=self.name, error=why, attempt=outage.tries)
        wait_ms = retry.backoff.delay_ms(outage.tries, random.random())  # noqa: S311  # jitter, no secret
        if retry.over((time.monotonic() - outage.began) * 1000 + wait_ms):
            self._error = SourceFailed(outage.tries, f"{why} (for {retry.deadline} ms)")
            self._end("failed")
            return
        log.warning("pipeline %s: attempt %d to read failed: %s; next in %d ms", self.name, outage.tries, why, wait_ms)
        outage.over_at = time.monotonic() + wait_ms / 1000

    def _try_source_again(self) -> None:
        outage = self._outage
        assert outage is not None, "called only during an outage"
        if outage.over_at is None or time.monotonic() < outage.over_at:
            return
        outage.over_at = None
        self._start_query_again()

    def _start_query_again(self) -> None:
        assert self._context is not None, "set by start"
        self._gate.last_done = None
        try:
            self._query = self._start_query(self._context)
        except Exception as error:  # see ``is_transient``
            if not is_transient(error):
                self._error = SourceFailed(1 if self._outage is None else self._outage.tries, short(error))
                self._end("failed")
                return
            self._wait_for_source(error)

    def _halt(self, to: State, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        with self._lock:
            self.check()
            if self._state != "running" or self._query is None:
                if self._state == "paused" and to == "stopped":
                    self._become("stopped")
                return
            self._stop_running(self._query, to, max(0.0, until - time.monotonic()))

    def _stop_running(self, query: StreamingQuery, to: State, timeout_s: float, *, drain_s: float = 0.0) -> None:
        until = time.monotonic() + timeout_s
        ended = self._gate.close(timeout_s)
        if ended:
            self._await_commit(query)
        else:
            log.warning(
                "pipeline %s: batch %s did not end within %g s of the stop; it is interrupted, and replayed at the "
                "next start",
                *(self.name, self._gate.inside, timeout_s),
            )
        self._stop_query(query)
        # A stop also reports the error of the last batch.
        failed = ended and self._error is not None and not isinstance(self._error, StopRequested)
        self._end("failed" if failed else to, drain_s=drain_s, timeout_s=max(1.0, until - time.monotonic()))

    def _stop_query(self, query: StreamingQuery) -> None:
        """Interrupts the query's jobs and waits for its thread. A sink may ignore the interruption."""
        try:
            query.stop()
        except Exception as error:  # the pipeline ends all the same; Spark's and py4j's errors have no common class
            log.warning("pipeline %s: Spark did not stop its query: %s", self.name, short(error))

    def _await_commit(self, query: StreamingQuery) -> None:
        """Waits for Spark's commit, which follows the return of our function. Else the batch would be replayed."""
        done, until = self._gate.last_done, time.monotonic() + _COMMIT_S
        pause_s = 0.01 if self.checkpoint.is_local else 0.1
        with suppress(StorageUnavailable):  # then the batch is replayed at the next start
            while done is not None and query.isActive and time.monotonic() < until:
                if self.checkpoint.committed(done):
                    return
                time.sleep(pause_s)

    def _end(self, to: State, *, drain_s: float = 0.0, timeout_s: float = STOP_S, tell_source: bool = True) -> None:
        if self._lag is not None:
            self._lag.stop()
        if self._slot is not None:
            self._slot.stop()
        if self._sinks_watch is not None:
            self._sinks_watch.stop()
        drained, until = time.monotonic() + drain_s, time.monotonic() + drain_s + timeout_s
        if to == "finished" and self._query is not None:
            self._last_progress = chosen(self._query.lastProgress, self._counted)
        for deliverer in self._deliverers:
            deliverer.stop(
                drain_s=max(0.0, drained - time.monotonic()),
                timeout_s=max(1.0, until - time.monotonic()),
                is_interrupted=lambda: to == "finished" and self._stop_requested,
            )
        if tell_source:
            self._tell_source()
        self._become("stopped" if to == "finished" and self._stop_requested else to)

    def _watch_slot(self) -> None:
        source = self.plan.pipeline.spec.source
        if source.has_slot:
            self._slot = SlotWatch(self.name, partial(source.slot_status, self.name), self._observer)
            self._slot.start()

    def _tell_source(self) -> None:
        try:
            last = self.checkpoint.last_committed()
            ends = None if last is None else self.checkpoint.ends(last)
            if ends:
                self.plan.pipeline.spec.source.finished(self._opening(), ends[0])
        except Exception as error:  # the next start repeats it, so that nothing is lost
            log.warning("pipeline %s: its last position was not reported to its source: %s", self.name, short(error))

    def _become(self, state: State) -> None:
        self._state = state
        self.checkpoint.forget_recent()
        self._observer("pipeline.status", pipeline=self.name, state=state)

    def _run_context(self, application: str) -> RunContext:
        queues = {
            sink.config.id: SinkQueue(
                self.checkpoint.queue(sink.config.id), sink.config.queue.max_bytes, sink.config.queue.min_free
            )
            for sink in self.plan.optional
        }
        return RunContext(
            *(application, self._secrets, queues, self._gate.closing, self._observer),
            unready=self._unready,
            lease=self._lease,
        )

    def _opening(self) -> Opening:
        batch, parallel = self.plan.pipeline.spec.batch, self._session.sparkContext.defaultParallelism
        return Opening(
            self.name,
            self.plan.pipeline.tenant,
            batch.max_events,
            batch.max_bytes,
            parallel,
            self._secrets,
            self.checkpoint.location,
            None if self.checkpoint.is_local else self._secrets.file(hand_over(gateway())),
            is_local_master(str(self._session.sparkContext.master)),
        )


def is_local_master(master: str) -> bool:
    """Whether tasks run in processes of the driver's host. ``local-cluster[...]`` starts workers of its own."""
    return master == "local" or master.startswith("local[")


class _SourceOutage:
    """An outage of the source; ``over_at`` is when the next attempt is due."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tries = 0
        self.over_at: float | None = None
