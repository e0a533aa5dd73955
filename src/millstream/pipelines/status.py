"""How a pipeline stands, for whoever asks: one record for the terminal, for HTTP and for the command line.

Spark reports on a batch when it is done, and one whose sink is being retried may not be done for hours. So a thread of
its own asks how far behind the pipeline is meanwhile, and nobody who looks has to wait for an answer."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.error_origin import short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.run_context import Gate, RunContext

State = Literal["new", "running", "paused", "stopped", "finished", "failed", "not running", "never started"]


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """``batch`` is the last that was committed, ``in_flight`` one that was planned and will be replayed. ``source`` is
    ``ok``, or ``retrying`` while it cannot be read. ``sinks`` says of each: ``ok``; ``retrying``, it gates the
    checkpoint and has refused the batch at hand so far; ``failed``, the pipeline has given up on it, or it is optional
    and parked until it is started again; ``catching up`` or ``failing``, batches wait on disk, as ``waiting`` counts.
    ``progress`` is that of the last batch that Spark reported on, except that its ``lag`` goes on being looked at while
    the next one takes long."""

    name: str
    tenant: str
    state: State
    error: str | None
    batch: int | None
    in_flight: int | None
    checkpoint: str
    source: str
    sinks: dict[str, str]
    waiting: dict[str, int]
    progress: dict[str, Any]


def at_rest(plan: PipelinePlan, checkpoint: Checkpoint) -> PipelineStatus:
    """Of a pipeline that does not run here, from its checkpoint."""
    started = checkpoint.owned(plan)
    return PipelineStatus(
        name=plan.pipeline.name,
        tenant=plan.pipeline.tenant,
        state="not running" if started else "never started",
        error=None,
        batch=checkpoint.last_committed(),
        in_flight=checkpoint.in_flight(),
        checkpoint=str(checkpoint.path),
        source="unknown",
        sinks={sink.config.id: "unknown" for sink in plan.pipeline.spec.sinks},
        waiting=checkpoint.waiting() if started else {},
        progress={},
    )


def chosen(last: Any, counted: tuple[int, int] | None = None) -> dict[str, Any]:
    """What of Spark's progress people want to see. Spark counts a row each time that a batch is read, once for each
    sink; ``counted`` (a batch and its events) is what the batch itself counted."""
    if last is None:
        return {}
    rows = counted[1] if counted is not None and counted[0] == last.batchId else last.numInputRows
    share = rows / last.numInputRows if last.numInputRows else 1.0
    sources = [
        {
            "input_rows_per_second": s.inputRowsPerSecond * share,
            "latest": s.latestOffset,
            "end": s.endOffset,
            "metrics": s.metrics,
        }
        for s in last.sources
    ]
    return {
        "batch": last.batchId,
        "rows": rows,
        "input_rows_per_second": last.inputRowsPerSecond * share,
        "processed_rows_per_second": last.processedRowsPerSecond * share,
        "batch_ms": last.durationMs.get("triggerExecution"),
        "lag": lag(s.latestOffset for s in last.sources),
        "durations_ms": dict(last.durationMs),
        "late_rows": sum(op.numRowsDroppedByWatermark for op in last.stateOperators),
        "sources": sources,
    }


def lag(reports: Iterable[Any]) -> int | None:
    """Entries that the streams hold beyond the batch, all sources together; None where one of them cannot say.

    Our source tells it with the streams' ends, in what Spark calls the latest offset; other sources do not.
    """
    counted = [_lag(report) for report in reports]
    known = [count for count in counted if count is not None]
    return sum(known) if known and len(known) == len(counted) else None


def _lag(report: Any) -> int | None:
    try:
        streams = (json.loads(report) if isinstance(report, str) else report)["streams"]
        return sum(int(stream["lag"]) for stream in streams.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # another source's offset, or a stream whose counts Redis cannot tell


log = logging.getLogger("millstream.pipelines")
_TICK_S = 1.0


class _Found(NamedTuple):
    batch: int
    entries: int | None


class LagWatch:
    """Asks once a tick, and only while one batch is at hand for longer than that. ``behind`` is told where the last
    finished batch ended, None where there is none."""

    def __init__(
        self,
        name: str,
        behind: Callable[[Any], int | None],
        checkpoint: Checkpoint,
        gate: Gate,
        context: RunContext,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        self._name = name
        self._ask = behind
        self._checkpoint = checkpoint
        self._gate = gate
        self._context = context
        self._tick_s = tick_s
        self._found: _Found | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="millstream-lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def shown(self) -> dict[str, Any]:
        """The lag of the batch at hand, in place of what Spark said of the one before; empty where that still holds."""
        found = self._found
        return {} if found is None or found.batch != self._gate.inside else {"lag": found.entries}

    def _loop(self) -> None:
        before: int | None = None
        while not self._stop.wait(self._tick_s):
            batch = self._gate.inside
            if batch is not None and batch == before:
                try:
                    self._look(batch)
                except Exception as error:  # an observer's, perhaps: nobody would miss a thread that ends here
                    log.warning("pipeline %s: the lag was not told: %s", self._name, short(error))
            before = batch

    def _look(self, batch: int) -> None:
        entries = self._behind(batch)
        self._found = _Found(batch, entries)
        facts: dict[str, int] = {} if entries is None else {"entries": entries}
        if self._context.newest_ms is not None:
            facts["newest_age_ms"] = self._context.clock.now_ms() - self._context.newest_ms
        if facts and batch == self._gate.inside:
            self._context.observer("pipeline.lag", pipeline=self._name, **facts)

    def _behind(self, batch: int) -> int | None:
        try:
            finished = self._checkpoint.ends(batch - 1)
            return self._ask(finished[0] if finished else None)
        except Exception as error:  # whatever it is, it is not the batch's: that goes on, and says its own
            log.debug("pipeline %s: the lag cannot be told: %s", self._name, short(error))
            return None
