"""One pipeline while it lives: its streaming query, its deliverers, its states. Pausing is stopping between batches;
resuming is starting again from the checkpoint."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from millstream.model import Observer, quiet
from millstream.pipelines.batch import BatchRunner
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import (
    OldBatchRefused,
    QueryVanished,
    SinkUnknown,
    SourceFailed,
    StopRequested,
    may_pass,
    short,
)
from millstream.pipelines.events import as_0_1_0_wrote
from millstream.pipelines.plan import PipelinePlan, before_the_batch
from millstream.pipelines.redis_address import SecretFiles
from millstream.pipelines.run_context import Gate, RunContext
from millstream.pipelines.sources import Opening
from millstream.pipelines.spool import Deliverer, Spool
from millstream.pipelines.status import LagWatch, PipelineStatus, SlotWatch, State, chosen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("millstream.pipelines")

_COMMIT_S = 10.0
_DRAIN_S = 60.0


class PipelineRun:
    """Thread-safe: people, signals and the monitor may all ask at once."""

    def __init__(
        self,
        session: SparkSession,
        plan: PipelinePlan,
        *,
        once: bool = False,
        secrets: SecretFiles | None = None,
        observer: Observer = quiet,
    ) -> None:
        # A session of its own: views, settings and data sources of one pipeline are invisible to the others.
        self._session = session.newSession()
        # A document may carry one name twice: the last one counts, as in most parsers; an error would stop everything.
        self._session.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
        # A batch that several sinks share is kept for seconds: squeezing it costs more than the memory is worth.
        self._session.conf.set("spark.sql.inMemoryColumnarStorage.compressed", "false")
        self.plan = plan
        self._once = once
        self._observer = observer
        self._secrets = secrets or SecretFiles()
        self.checkpoint = Checkpoint(plan.pipeline.checkpoint_path)
        self._lock = threading.RLock()
        self._state: State = "new"
        self._error: BaseException | None = None
        self._query: StreamingQuery | None = None
        self._context: RunContext | None = None
        self._gate = Gate()
        self._deliverers: list[Deliverer] = []
        self._lag: LagWatch | None = None
        self._slot: SlotWatch | None = None
        self._outage: _SourceOutage | None = None
        self._old_batch: int | None = None  # what the query is about, where 0.1.0 left it half done
        self._counted: tuple[int, int] | None = None

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
        """Begins, or goes on from the checkpoint, also after a failure. Raises CheckpointRefused where the spec does
        not fit it."""
        with self._lock:
            if self._state == "running":
                return
            application = self.checkpoint.open(self.plan)
            self._gate, self._error, self._outage, self._counted = Gate(), None, None, None
            context = self._context = self._run_context(application)
            self._deliverers = [
                Deliverer(self._session, self.plan, sink, context.spools[sink.config.id], context)
                for sink in self.plan.optional
            ]
            self._query = self._start_query(context)
            for deliverer in self._deliverers:
                deliverer.start()
            behind = partial(self.plan.pipeline.spec.source.behind, self._opening())
            self._lag = LagWatch(self.name, behind, self.checkpoint, self._gate, context)
            self._lag.start()
            self._watch_slot()
            self._become("running")

    def stop(self) -> None:
        """After the batch at hand, committed; a sink that is being retried is given up, and its batch comes again."""
        self._halt("stopped")

    def pause(self) -> None:
        """As ``stop``; ``resume`` goes on from the checkpoint."""
        self._halt("paused")

    def resume(self) -> None:
        with self._lock:
            if self._state == "paused":
                self.start()

    def start_sink(self, name: str) -> None:
        """Starts an optional sink again that was parked because it failed for good."""
        for deliverer in self._deliverers:
            if deliverer.name == name:
                deliverer.start_again()
                return
        known = ", ".join(deliverer.name for deliverer in self._deliverers) or "none"
        raise SinkUnknown(f"pipeline {self.name!r} runs no optional sink {name!r}; there are: {known}", sink=name)

    def check(self) -> State:
        """Looks whether the query has ended by itself, and says how the pipeline stands."""
        with self._lock:
            query = self._query
            if self._state != "running" or query is None:
                return self._state
            if self._outage is not None and self._outage.over_at is not None:
                self._try_source_again()
            elif not query.isActive:
                self._ended_by_itself(query)
            elif self._outage is not None and (self._gate.last_done is not None or query.lastProgress is not None):
                self._outage = None  # it has been read: what comes next is another outage
            return self._state

    def status(self) -> PipelineStatus:
        query, context = self._query, self._context
        running = query is not None and self._state == "running"
        progress = chosen(query.lastProgress, self._counted) if running and query is not None else {}
        progress |= self._lag.shown() if self._lag is not None else {}
        progress |= self._slot.shown() if self._slot is not None else {}
        troubles = {} if context is None else context.troubles
        sinks = {sink.config.id: "ok" for sink in self.plan.gating} | troubles
        sinks |= {deliverer.name: deliverer.state for deliverer in self._deliverers}
        return PipelineStatus(
            name=self.name,
            tenant=self.plan.pipeline.tenant,
            state=self._state,
            error=str(self._error) if self._error is not None and self._state == "failed" else None,
            batch=self.checkpoint.last_committed(),
            in_flight=self.checkpoint.in_flight(),
            checkpoint=str(self.checkpoint.path),
            source="ok" if self._outage is None else "retrying",
            sinks=sinks,
            waiting={} if context is None else {name: spool.count() for name, spool in context.spools.items()},
            progress=progress,
        )

    def _start_query(self, context: RunContext) -> StreamingQuery:
        source, gate = self.plan.pipeline.spec.source, self._gate
        runner = BatchRunner(self.plan, context)
        opened = source.open(self._session, self._opening())
        self._old_batch = self.checkpoint.old_batch()
        events = before_the_batch(opened if self._old_batch is None else as_0_1_0_wrote(opened), self.plan)

        def on_batch(frame: DataFrame, batch_id: int) -> None:
            try:
                with gate.batch(batch_id):
                    self._counted = (batch_id, runner.run(frame, batch_id))
            except BaseException as error:
                # Spark hands on a text; the error itself is kept here.
                self._error = error
                raise

        writer = events.writeStream.queryName(self.name).option("checkpointLocation", self.checkpoint.spark)
        if self._old_batch is not None:
            writer = writer.trigger(once=True)  # which is the batch that was planned, and no other
        elif self._once:
            writer = writer.trigger(availableNow=True)
        elif self.plan.pipeline.spec.batch.max_ms:
            writer = writer.trigger(processingTime=f"{self.plan.pipeline.spec.batch.max_ms} milliseconds")
        return writer.foreachBatch(on_batch).start()

    def _ended_by_itself(self, query: StreamingQuery) -> None:
        failure = query.exception()
        done = failure is None and self.checkpoint.in_flight() is None
        if done and self._old_batch is not None:
            self._start_query_again()
        elif done and self._once:
            self._end("finished", drain_s=_DRAIN_S)
        elif isinstance(self._error, StopRequested):
            self._end("stopped")
        elif failure is not None and self._error is None and may_pass(failure):
            self._wait_for_source(failure)
        else:
            # No error is no success: a query that is to run on, or leaves a batch behind, was stopped by somebody else.
            why = self._error or failure or QueryVanished()
            self._error = why if self._old_batch is None else OldBatchRefused(self._old_batch, short(why))
            self._end("failed")

    def _wait_for_source(self, failure: BaseException) -> None:
        """The query has ended outside its batches: planning them could not reach the source. It begins again."""
        retry = self.plan.pipeline.spec.retry
        outage = self._outage = self._outage or _SourceOutage()
        outage.tries += 1
        why = short(failure)
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
        assert outage is not None, "asked for while one lasts"
        if outage.over_at is None or time.monotonic() < outage.over_at:
            return
        outage.over_at = None
        self._start_query_again()

    def _start_query_again(self) -> None:
        assert self._context is not None, "made by the start"
        self._gate.last_done = None
        try:
            self._query = self._start_query(self._context)
        except Exception as error:
            if not may_pass(error):
                self._error = SourceFailed(1 if self._outage is None else self._outage.tries, short(error))
                self._end("failed")
                return
            self._wait_for_source(error)

    def _halt(self, to: State) -> None:
        with self._lock:
            self.check()
            if self._state != "running" or self._query is None:
                if self._state == "paused" and to == "stopped":
                    self._become("stopped")
                return
            self._gate.close()
            self._await_commit(self._query)
            self._query.stop()
            # Whoever stops a pipeline is told, too, what its last batch has failed for.
            failed = self._error is not None and not isinstance(self._error, StopRequested)
            self._end("failed" if failed else to)

    def _await_commit(self, query: StreamingQuery) -> None:
        """Spark records a batch as done after our function has returned: stopping in between would replay it."""
        done, until = self._gate.last_done, time.monotonic() + _COMMIT_S
        while done is not None and query.isActive and not self.checkpoint.committed(done) and time.monotonic() < until:
            time.sleep(0.01)

    def _end(self, to: State, *, drain_s: float = 0.0) -> None:
        if self._lag is not None:
            self._lag.stop()
        if self._slot is not None:
            self._slot.stop()
        for deliverer in self._deliverers:
            deliverer.stop(drain_s=drain_s)
        self._tell_source()
        self._become(to)

    def _watch_slot(self) -> None:
        source = self.plan.pipeline.spec.source
        if source.has_slot:
            self._slot = SlotWatch(self.name, partial(source.slot_status, self.name), self._observer)
            self._slot.start()

    def _tell_source(self) -> None:
        last = self.checkpoint.last_committed()
        ends = None if last is None else self.checkpoint.ends(last)
        if ends:
            try:
                self.plan.pipeline.spec.source.finished(self._opening(), ends[0])
            except Exception as error:  # the next start tells it again, so that nothing is lost
                log.warning("pipeline %s: its source was not told where it ended: %s", self.name, short(error))

    def _become(self, state: State) -> None:
        self._state = state
        self._observer("pipeline.status", pipeline=self.name, state=state)

    def _run_context(self, application: str) -> RunContext:
        spools = {
            sink.config.id: Spool(
                self.checkpoint.spool(sink.config.id), sink.config.spool.max_bytes, sink.config.spool.min_free
            )
            for sink in self.plan.optional
        }
        return RunContext(application, self._secrets, spools, self._gate.closing, self._observer)

    def _opening(self) -> Opening:
        batch, parallel = self.plan.pipeline.spec.batch, self._session.sparkContext.defaultParallelism
        return Opening(
            self.name,
            self.plan.pipeline.tenant,
            batch.max_events,
            batch.max_bytes,
            parallel,
            self._secrets,
            str(self.checkpoint.path.absolute()),
        )


class _SourceOutage:
    """The source cannot be read; ``over_at`` is when it is tried again."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tries = 0
        self.over_at: float | None = None
