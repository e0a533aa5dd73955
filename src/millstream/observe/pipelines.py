"""Pipelines as others see them: their facts as metrics, under the names that people's dashboards already have; and over
HTTP how they stand, their checkpoints and dead letters, and pause, resume, stop, start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millstream.observe.http import error
from millstream.observe.metrics import LATENCY_BUCKETS
from millstream.pipelines import PipelineUnknown, SinkUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.pipelines import PipelineRun, Runner

_STATES = ("new", "running", "paused", "stopped", "finished", "failed")
_WAL_STATES = ("reserved", "extended", "unreserved", "lost")
_STAGES = {"latestOffset": "source", "addBatch": "batch", "walCommit": "plan", "commitOffsets": "commit"}


class PipelineMetrics:
    """An observer: call it with facts. Facts of other rooms are ignored."""

    def __init__(self, registry: CollectorRegistry) -> None:
        one, sink = ["pipeline"], ["pipeline", "sink"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"millstream_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(f"millstream_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, labels: list[str]) -> Histogram:
            return Histogram(f"millstream_{name}", text, labels, buckets=LATENCY_BUCKETS, registry=registry)

        self._source_events = counter("source_events_total", "Events read.", one)
        self._source_lag = gauge(
            "source_lag_seconds", "Age of the newest event that the sinks have, when a batch ended or is late.", one
        )
        self._source_lag_entries = gauge("source_lag_entries", "Entries beyond the last finished batch.", one)
        self._source_errors = counter("source_errors_total", "Attempts to read the source that failed.", one)
        self._slot_held = gauge("slot_held_bytes", "Log that a database keeps for its slot.", ["pipeline", "slot"])
        self._slot_status = gauge(
            "slot_wal_status", "1 for the state of the slot's log.", ["pipeline", "slot", "wal_status"]
        )
        self._slot_silent = gauge(
            "slot_unacknowledged_seconds", "Since the slot's position last moved.", ["pipeline", "slot"]
        )
        self._late = counter("late_events_total", "Events that came after their watermark.", one)
        self._batch_events = Histogram(
            "millstream_batch_events",
            "Events in a batch.",
            one,
            buckets=tuple(10**n for n in range(8)),
            registry=registry,
        )
        self._stage = histogram("stage_latency_seconds", "Time that a batch spent in a stage.", ["pipeline", "stage"])
        self._processors = histogram(
            "processor_latency_seconds",
            "Time of the step that runs a batch's processors; Spark runs them as one, together with what step says.",
            ["pipeline", "step"],
        )
        self._sink_events = counter("sink_events_total", "Events delivered.", sink)
        self._sink_batches = counter("sink_batch_total", "Batches delivered.", sink)
        self._sink_bytes = counter("sink_bytes_total", "Bytes of events delivered, as text.", sink)
        self._sink_latency = histogram("sink_latency_seconds", "Time to deliver a batch, retries included.", sink)
        self._sink_errors = counter("sink_errors_total", "Attempts to deliver that failed.", sink)
        self._sink_status = gauge("sink_checkpoint_status", "1: the sink has the last batch; 0: it is behind.", sink)
        self._spooled = gauge("sink_spooled_batches", "Batches that wait on disk for an optional sink.", sink)
        self._sink_failed = counter("sink_failed_total", "Times that an optional sink was parked as failed.", sink)
        self._capped = counter("sink_capped_total", "Entries that a hard cap took before a group had read them.", sink)
        self._dropped = counter("sink_dropped_batches_total", "Batches that a full spool gave up.", sink)
        self._checkpoints = counter("checkpoints_total", "Batches finished.", one)
        self._last_checkpoint = gauge("last_checkpoint_ts", "When the last batch was finished, in seconds.", one)
        self._e2e = histogram("e2e_latency_seconds", "Age of a batch's oldest event, when the sinks have it.", one)
        self._status = gauge("pipeline_status", "1 for the state that the pipeline is in.", ["pipeline", "state"])
        self._dlq_events = counter("dlq_events_total", "Events that became dead letters.", one)
        self._dlq_rejected = counter("dlq_rejected_total", "Dead letters that a full stream refused.", one)
        self._dlq_entries = gauge("dlq_entries", "Dead letters in the stream.", one)
        self._dlq_saturation = gauge("dlq_saturation_ratio", "Dead letters over their maximum.", one)
        self._on: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "pipeline.batch": self._batch,
            "pipeline.processors": lambda f: self._processors.labels(f["pipeline"], f["step"]).observe(f["s"]),
            "pipeline.sink": self._sink,
            "pipeline.sink_error": self._sink_error,
            "pipeline.sink_failed": lambda f: self._sink_failed.labels(f["pipeline"], f["sink"]).inc(),
            "pipeline.source_error": lambda f: self._source_errors.labels(f["pipeline"]).inc(),
            "pipeline.spooled": self._waiting,
            "pipeline.delivered": self._waiting,
            "pipeline.spool_dropped": lambda f: self._dropped.labels(f["pipeline"], f["sink"]).inc(),
            "pipeline.dead_letters": self._dead_letters,
            "pipeline.dead_letters_rejected": lambda f: self._dlq_rejected.labels(f["pipeline"]).inc(f["events"]),
            "pipeline.progress": self._progress,
            "pipeline.lag": self._lag,
            "pipeline.slot": self._slot,
            "pipeline.status": self._state,
        }

    def __call__(self, name: str, /, **facts: Any) -> None:
        handle = self._on.get(name)
        if handle is not None:
            handle(facts)

    def _batch(self, facts: Mapping[str, Any]) -> None:
        pipeline = facts["pipeline"]
        self._source_events.labels(pipeline).inc(facts["events"])
        self._batch_events.labels(pipeline).observe(facts["events"])
        self._checkpoints.labels(pipeline).inc()
        self._last_checkpoint.labels(pipeline).set(time.time())
        if "oldest_age_ms" in facts:
            self._e2e.labels(pipeline).observe(max(0.0, facts["oldest_age_ms"] / 1000))
        self._lag(facts)

    def _lag(self, facts: Mapping[str, Any]) -> None:
        """Told with each batch, and again and again while one takes long: what a gauge shows then must not be stale."""
        if "newest_age_ms" in facts:
            self._source_lag.labels(facts["pipeline"]).set(max(0.0, facts["newest_age_ms"] / 1000))
        if facts.get("entries") is not None:
            self._source_lag_entries.labels(facts["pipeline"]).set(facts["entries"])

    def _slot(self, facts: Mapping[str, Any]) -> None:
        labels = (facts["pipeline"], facts["slot"])
        self._slot_held.labels(*labels).set(facts["held_bytes"])
        self._slot_silent.labels(*labels).set(facts["unacknowledged_s"])
        for status in {*_WAL_STATES, facts["wal_status"]}:
            self._slot_status.labels(*labels, status).set(1 if status == facts["wal_status"] else 0)

    def _sink(self, facts: Mapping[str, Any]) -> None:
        labels = (facts["pipeline"], facts["sink"])
        self._sink_events.labels(*labels).inc(facts["rows"])
        self._sink_batches.labels(*labels).inc()
        self._sink_bytes.labels(*labels).inc(facts["bytes"])
        self._capped.labels(*labels).inc(facts.get("dropped", 0))
        self._sink_latency.labels(*labels).observe(facts["s"])
        self._sink_status.labels(*labels).set(1)
        self._stage.labels(facts["pipeline"], "sink").observe(facts["s"])

    def _sink_error(self, facts: Mapping[str, Any]) -> None:
        self._sink_errors.labels(facts["pipeline"], facts["sink"]).inc()
        self._sink_status.labels(facts["pipeline"], facts["sink"]).set(0)

    def _waiting(self, facts: Mapping[str, Any]) -> None:
        self._spooled.labels(facts["pipeline"], facts["sink"]).set(facts["waiting"])
        self._sink_status.labels(facts["pipeline"], facts["sink"]).set(0 if facts["waiting"] else 1)

    def _dead_letters(self, facts: Mapping[str, Any]) -> None:
        self._dlq_events.labels(facts["pipeline"]).inc(facts["events"])
        self._dlq_entries.labels(facts["pipeline"]).set(facts["entries"])
        self._dlq_saturation.labels(facts["pipeline"]).set(facts["saturation"])

    def _progress(self, facts: Mapping[str, Any]) -> None:
        self._late.labels(facts["pipeline"]).inc(facts.get("late_rows", 0))
        self._lag({"pipeline": facts["pipeline"], "entries": facts.get("lag")})
        for spark, ours in _STAGES.items():
            if spark in facts["durations_ms"]:
                self._stage.labels(facts["pipeline"], ours).observe(facts["durations_ms"][spark] / 1000)

    def _state(self, facts: Mapping[str, Any]) -> None:
        for state in _STATES:
            self._status.labels(facts["pipeline"], state).set(1 if state == facts["state"] else 0)


_DEAD_LETTERS = 100
_VERBS = ("pause", "resume", "stop", "start")


class PipelineRoutes:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def routes(self) -> list[Route]:
        one = "/pipelines/{name}"
        return [
            Route("/pipelines", self._all),
            Route(one, self._known(lambda run, _: asdict(run.status()))),
            Route(f"{one}/checkpoints", self._known(_checkpoints)),
            Route(f"{one}/dlq", self._known(_dead_letters)),
            Route(f"{one}/sinks/{{sink}}/start", self._known(_start_sink), methods=["POST"]),
            *(Route(f"{one}/{verb}", self._known(_verb(verb)), methods=["POST"]) for verb in _VERBS),
        ]

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Ill when a pipeline has failed; a paused or finished one is well."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return "failed" not in states.values(), {"pipelines": states}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready when every pipeline has got past its start."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return bool(states) and not {"new", "failed"} & set(states.values()), {"pipelines": states}

    def _all(self, request: Request) -> Response:
        return JSONResponse([asdict(status) for status in self._runner.statuses()])

    def _known(self, answer: Callable[[PipelineRun, Request], Any]) -> Callable[[Request], Response]:
        # Plain functions: Starlette runs them in a thread, and pausing waits for a batch to end.
        def handle(request: Request) -> Response:
            try:
                run = self._runner.named(request.path_params["name"])
                return JSONResponse(answer(run, request))
            except (PipelineUnknown, SinkUnknown) as problem:
                return error("not_found", str(problem), 404)

        return handle


def _verb(verb: str) -> Callable[[PipelineRun, Request], Any]:
    def act(run: PipelineRun, request: Request) -> Any:
        getattr(run, verb)()
        return asdict(run.status())

    return act


def _start_sink(run: PipelineRun, request: Request) -> Any:
    run.start_sink(request.path_params["sink"])
    return asdict(run.status())


def _checkpoints(run: PipelineRun, request: Request) -> Any:
    return [asdict(batch) for batch in run.checkpoint.batches()]


def _dead_letters(run: PipelineRun, request: Request) -> Any:
    target = run.plan.dead_letters
    if target is None:
        return {"stream": None, "entries": []}
    with target.address.open() as broker:
        found = broker.xrevrange(target.stream, count=_DEAD_LETTERS)
        total = broker.xlen(target.stream)
    shown = [{"id": str(e.id), **{k.decode(): v.decode(errors="replace") for k, v in e.fields.items()}} for e in found]
    return {"stream": target.stream, "total": total, "entries": shown}
