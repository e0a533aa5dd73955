"""One pipeline while it lives: its streaming query, its deliverers, its states. Pausing is stopping between batches;
resuming is starting again from the checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from millstream.model import Observer, quiet
from millstream.pipelines.batch import BatchRunner
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import StopRequested
from millstream.pipelines.plan import PipelinePlan, config_of
from millstream.pipelines.run_context import Gate, RunContext
from millstream.pipelines.sources import Opening
from millstream.pipelines.spool import Deliverer, Spool
from millstream.pipelines.stages import before_the_batch
from millstream.pipelines.status import LagWatch, PipelineStatus, State, chosen

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
        addresses: dict[str, str] | None = None,
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
        self._addresses = addresses or {}
        self.checkpoint = Checkpoint(plan.pipeline.checkpoint_path)
        self._lock = threading.RLock()
        self._state: State = "new"
        self._error: BaseException | None = None
        self._query: StreamingQuery | None = None
        self._gate = Gate()
        self._deliverers: list[Deliverer] = []
        self._lag: LagWatch | None = None
        self._troubles: dict[str, str] = {}

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
        """Begins, or goes on from the checkpoint. Raises CheckpointRefused where the spec does not fit it."""
        with self._lock:
            if self._state == "running":
                return
            application = self.checkpoint.open(self.plan)
            self._gate, self._error = Gate(), None
            context = self._run_context(application)
            self._troubles = context.troubles
            runner = BatchRunner(self.plan, context)
            source = self.plan.pipeline.spec.source
            events = before_the_batch(source.open(self._session, self._opening()), self.plan)
            self._deliverers = [
                Deliverer(self._session, self.plan, sink, context.spools[config_of(sink).id], context)
                for sink in self.plan.optional
            ]
            gate = self._gate

            def on_batch(frame: DataFrame, batch_id: int) -> None:
                try:
                    with gate.batch(batch_id):
                        runner.run(frame, batch_id)
                except BaseException as error:
                    # Spark hands on a text; the error itself is kept here.
                    self._error = error
                    raise

            writer = events.writeStream.queryName(self.name).option("checkpointLocation", self.checkpoint.spark)
            if self._once:
                writer = writer.trigger(availableNow=True)
            elif self.plan.pipeline.spec.batch.max_ms:
                writer = writer.trigger(processingTime=f"{self.plan.pipeline.spec.batch.max_ms} milliseconds")
            for deliverer in self._deliverers:
                deliverer.start()
            self._query = writer.foreachBatch(on_batch).start()
            self._lag = LagWatch(self.name, partial(source.behind, self._opening()), self.checkpoint, gate, context)
            self._lag.start()
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

    def check(self) -> State:
        """Looks whether the query has ended by itself, and says how the pipeline stands."""
        with self._lock:
            query = self._query
            if self._state == "running" and query is not None and not query.isActive:
                failure = query.exception()
                if failure is None:
                    self._end("finished", drain_s=_DRAIN_S)
                elif isinstance(self._error, StopRequested):
                    self._end("stopped")
                else:
                    self._error = self._error or failure
                    self._end("failed")
            return self._state

    def status(self) -> PipelineStatus:
        query = self._query
        progress = chosen(query.lastProgress) if query is not None and self._state == "running" else {}
        progress |= self._lag.shown() if self._lag is not None else {}
        sinks = {config_of(sink).id: "ok" for sink in self.plan.gating} | self._troubles
        sinks |= {deliverer.name: deliverer.state for deliverer in self._deliverers}
        error = None if self._error is None else str(self._error)
        shown = error if self._state == "failed" else None
        pipeline = self.plan.pipeline
        return PipelineStatus(
            self.name, pipeline.tenant, self._state, shown, self.checkpoint.last_committed(), sinks, progress
        )

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
            self._end(to)

    def _await_commit(self, query: StreamingQuery) -> None:
        """Spark records a batch as done after our function has returned: stopping in between would replay it."""
        done, until = self._gate.last_done, time.monotonic() + _COMMIT_S
        while done is not None and query.isActive and not self.checkpoint.committed(done) and time.monotonic() < until:
            time.sleep(0.01)

    def _end(self, to: State, *, drain_s: float = 0.0) -> None:
        if self._lag is not None:
            self._lag.stop()
        for deliverer in self._deliverers:
            deliverer.stop(drain_s=drain_s)
        self._become(to)

    def _become(self, state: State) -> None:
        self._state = state
        self._observer("pipeline.status", pipeline=self.name, state=state)

    def _run_context(self, application: str) -> RunContext:
        spools = {
            config_of(sink).id: Spool(self.checkpoint.spool(config_of(sink).id), config_of(sink).spool.max_bytes)
            for sink in self.plan.optional
        }
        return RunContext(application, self._addresses, spools, self._gate.closing, self._observer)

    def _opening(self) -> Opening:
        batch, parallel = self.plan.pipeline.spec.batch, self._session.sparkContext.defaultParallelism
        return Opening(
            self.name, self.plan.pipeline.tenant, batch.max_events, batch.max_bytes, parallel, self._addresses
        )
