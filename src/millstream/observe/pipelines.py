"""Metrics and HTTP routes of pipelines.

The metrics come from observer events, under names that existing Grafana dashboards use. The routes show status,
checkpoints and dead letters, and pause, resume, stop and start a pipeline.
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
from millstream.pipelines.errors import PipelineUnknown, SinkUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.pipelines import PipelineRun, Runner

_STATES = ("new", "running", "paused", "stopped", "finished", "failed")
_WAL_STATES = ("reserved", "extended", "unreserved", "lost")
_STAGES = {"latestOffset": "source", "addBatch": "batch", "walCommit": "plan", "commitOffsets": "commit"}


class PipelineMetrics:
    """An observer of pipeline events; events of other packages are ignored."""

    def __init__(self, registry: CollectorRegistry) -> None:
        pipeline, sink = ["pipeline"], ["pipeline", "sink"]

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(f"millstream_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(f"millstream_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, labels: list[str]) -> Histogram:
            return Histogram(f"millstream_{name}", text, labels, buckets=LATENCY_BUCKETS, registry=registry)

        self._source_events = counter("source_events_total", "Events read.", pipeline)
        self._source_lag = gauge(
            "source_lag_seconds",
            "Age of the newest event that the sinks have, when a batch ended or is late.",
            pipeline,
        )
        self._source_lag_entries = gauge("source_lag_entries", "Entries beyond the last finished batch.", pipeline)
        self._source_errors = counter("source_errors_total", "Attempts to read the source that failed.", pipeline)
        self._slot_held = gauge("slot_held_bytes", "Log that a database keeps for its slot.", ["pipeline", "slot"])
        self._slot_status = gauge(
            "slot_wal_status", "1 for the current wal_status of the slot.", ["pipeline", "slot", "wal_status"]
        )
        self._slot_silent = gauge(
            "slot_unacknowledged_seconds", "Time since the slot's position last advanced.", ["pipeline", "slot"]
        )
        self._late = counter("late_events_total", "Events that arrived after their watermark.", pipeline)
        self._batch_events = Histogram(
            "millstream_batch_events",
            "Events in a batch.",
            pipeline,
            buckets=tuple(10**n for n in range(8)),
            registry=registry,
        )
        self._stage = histogram("stage_latency_seconds", "Duration of a stage of a batch.", ["pipeline", "stage"])
        self._processors = histogram(
            "processor_latency_seconds",
            "Duration of the step that runs the processors of a batch, which Spark combines into one.",
            ["pipeline", "step"],
        )
        self._sink_events = counter("sink_events_total", "Events delivered.", sink)
        self._sink_skipped = counter(
            "sink_skipped_total",
            "Events that were already in the sink, and were not added again.",
            sink,
        )
        self._sink_batches = counter("sink_batch_total", "Batches delivered.", sink)
        self._sink_bytes = counter("sink_bytes_total", "Bytes of events delivered, as text.", sink)
        self._sink_latency = histogram(
            "sink_latency_seconds", "Duration of the delivery of a batch, including retries.", sink
        )
        self._sink_errors = counter("sink_errors_total", "Attempts to deliver that failed.", sink)
        self._sink_status = gauge("sink_checkpoint_status", "1: the sink has the last batch; 0: it is behind.", sink)
        self._queued = gauge("sink_spooled_batches", "Batches in the sink queue of an optional sink.", sink)
        self._sink_failed = counter("sink_failed_total", "Times that an optional sink was stopped as failed.", sink)
        self._capped = counter(
            "sink_capped_total", "Entries that a hard cap removed before a group had read them.", sink
        )
        self._dropped = counter("sink_dropped_batches_total", "Batches that a full sink queue dropped.", sink)
        self._checkpoints = counter("checkpoints_total", "Batches finished.", pipeline)
        self._last_checkpoint = gauge("last_checkpoint_ts", "When the last batch was finished, in seconds.", pipeline)
        self._e2e = histogram("e2e_latency_seconds", "Age of a batch's oldest event, when the sinks have it.", pipeline)
        self._status = gauge("pipeline_status", "1 for the state that the pipeline is in.", ["pipeline", "state"])
        self._dlq_events = counter("dlq_events_total", "Events that became dead letters.", pipeline)
        self._dlq_rejected = counter(
            "dlq_rejected_total", "Dead letters rejected because their stream was full.", pipeline
        )
        self._dlq_entries = gauge("dlq_entries", "Dead letters in the stream.", pipeline)
        self._dlq_saturation = gauge("dlq_saturation_ratio", "Dead letters over their maximum.", pipeline)
        self._on: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "pipeline.batch": self._batch,
            "pipeline.processors": lambda fields: self._processors.labels(fields["pipeline"], fields["step"]).observe(
                fields["s"]
            ),
            "pipeline.sink": self._sink,
            "pipeline.sink_error": self._sink_error,
            "pipeline.sink_failed": lambda fields: self._sink_failed.labels(fields["pipeline"], fields["sink"]).inc(),
            "pipeline.source_error": lambda fields: self._source_errors.labels(fields["pipeline"]).inc(),
            "pipeline.queued": self._waiting,
            "pipeline.delivered": self._waiting,
            "pipeline.queue_dropped": lambda fields: self._dropped.labels(fields["pipeline"], fields["sink"]).inc(),
            "pipeline.dead_letters": self._dead_letters,
            "pipeline.dead_letters_rejected": lambda fields: self._dlq_rejected.labels(fields["pipeline"]).inc(
                fields["events"]
            ),
            "pipeline.progress": self._progress,
            "pipeline.lag": self._lag,
            "pipeline.slot": self._slot,
            "pipeline.status": self._state,
        }

    def __call__(self, name: str, /, **fields: Any) -> None:
        handle = self._on.get(name)
        if handle is not None:
            handle(fields)

    def _batch(self, fields: Mapping[str, Any]) -> None:
        pipeline = fields["pipeline"]
        self._source_events.labels(pipeline).inc(fields["events"])
        self._batch_events.labels(pipeline).observe(fields["events"])
        self._checkpoints.labels(pipeline).inc()
        self._last_checkpoint.labels(pipeline).set(time.time())
        if "oldest_age_ms" in fields:
            self._e2e.labels(pipeline).observe(max(0.0, fields["oldest_age_ms"] / 1000))
        self._lag(fields)

    def _lag(self, fields: Mapping[str, Any]) -> None:
        """Update the lag; emitted with each batch, and repeatedly during a long batch, so that it does not go stale."""
        if "newest_age_ms" in fields:
            self._source_lag.labels(fields["pipeline"]).set(max(0.0, fields["newest_age_ms"] / 1000))
        if fields.get("entries") is not None:
            self._source_lag_entries.labels(fields["pipeline"]).set(fields["entries"])

    def _slot(self, fields: Mapping[str, Any]) -> None:
        labels = (fields["pipeline"], fields["slot"])
        self._slot_held.labels(*labels).set(fields["held_bytes"])
        self._slot_silent.labels(*labels).set(fields["unacknowledged_s"])
        for status in {*_WAL_STATES, fields["wal_status"]}:
            self._slot_status.labels(*labels, status).set(1 if status == fields["wal_status"] else 0)

    def _sink(self, fields: Mapping[str, Any]) -> None:
        labels = (fields["pipeline"], fields["sink"])
        self._sink_events.labels(*labels).inc(fields["rows"])
        self._sink_skipped.labels(*labels).inc(fields.get("skipped", 0))
        self._sink_batches.labels(*labels).inc()
        self._sink_bytes.labels(*labels).inc(fields["bytes"])
        self._capped.labels(*labels).inc(fields.get("dropped", 0))
        self._sink_latency.labels(*labels).observe(fields["s"])
        self._sink_status.labels(*labels).set(1)
        self._stage.labels(fields["pipeline"], "sink").observe(fields["s"])

    def _sink_error(self, fields: Mapping[str, Any]) -> None:
        self._sink_errors.labels(fields["pipeline"], fields["sink"]).inc()
        self._sink_status.labels(fields["pipeline"], fields["sink"]).set(0)

    def _waiting(self, fields: Mapping[str, Any]) -> None:
        self._queued.labels(fields["pipeline"], fields["sink"]).set(fields["waiting"])
        self._sink_status.labels(fields["pipeline"], fields["sink"]).set(0 if fields["waiting"] else 1)

    def _dead_letters(self, fields: Mapping[str, Any]) -> None:
        self._dlq_events.labels(fields["pipeline"]).inc(fields["events"])
        self._dlq_entries.labels(fields["pipeline"]).set(fields["entries"])
        self._dlq_saturation.labels(fields["pipeline"]).set(fields["saturation"])

    def _progress(self, fields: Mapping[str, Any]) -> None:
        self._late.labels(fields["pipeline"]).inc(fields.get("late_rows", 0))
        self._lag({"pipeline": fields["pipeline"], "entries": fields.get("lag")})
        for spark, ours in _STAGES.items():
            if spark in fields["durations_ms"]:
                self._stage.labels(fields["pipeline"], ours).observe(fields["durations_ms"][spark] / 1000)

    def _state(self, fields: Mapping[str, Any]) -> None:
        for state in _STATES:
            self._status.labels(fields["pipeline"], state).set(1 if state == fields["state"] else 0)


MAX_DEAD_LETTERS = 100
_VERBS = ("pause", "resume", "stop", "start")


class PipelineRoutes:
    """The HTTP routes of a runner's pipelines."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def routes(self) -> list[Route]:
        path = "/pipelines/{name}"
        return [
            Route("/pipelines", self._all),
            Route(path, self._with_pipeline(lambda run, _: asdict(run.status()))),
            Route(f"{path}/checkpoints", self._with_pipeline(_checkpoints)),
            Route(f"{path}/dlq", self._with_pipeline(_dead_letters)),
            Route(f"{path}/sinks/{{sink}}/start", self._with_pipeline(_start_sink), methods=["POST"]),
            *(Route(f"{path}/{verb}", self._with_pipeline(_verb(verb)), methods=["POST"]) for verb in _VERBS),
        ]

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Unhealthy if a pipeline has failed. Paused and finished pipelines are healthy."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return "failed" not in states.values(), {"pipelines": states}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready if every pipeline has started."""
        states = {status.name: status.state for status in self._runner.statuses()}
        return bool(states) and not {"new", "failed"} & set(states.values()), {"pipelines": states}

    def _all(self, request: Request) -> Response:
        return JSONResponse([asdict(status) for status in self._runner.statuses()])

    def _with_pipeline(self, answer: Callable[[PipelineRun, Request], Any]) -> Callable[[Request], Response]:
        # A plain function, because pausing waits for the end of a batch; Starlette runs it in a thread.
        def handle(request: Request) -> Response:
            try:
                run = self._runner.named(request.path_params["name"])
                return JSONResponse(answer(run, request))
            except (PipelineUnknown, SinkUnknown) as unknown:
                return error("not_found", str(unknown), 404)

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
        newest = broker.xrevrange(target.stream, count=MAX_DEAD_LETTERS)
        total = broker.xlen(target.stream)
    entries = [
        {"id": str(entry.id), **{key.decode(): value.decode(errors="replace") for key, value in entry.fields.items()}}
        for entry in newest
    ]
    return {"stream": target.stream, "total": total, "entries": entries}
