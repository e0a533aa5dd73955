"""All workers as one service: readiness, liveness and aggregated metrics.

Counters and histograms are summed over the workers. What a worker counted stays in the sum after the worker has died,
so a counter never decreases. A worker's gauges end with the worker. Reports arrive 50 ms after something was counted;
what a worker counted between its last report and its death by SIGKILL is missing in the sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

MAX_TOPICS: Final = 200
"""The number of topics whose lag and length are in /metrics."""
SILENT_AFTER_S: Final = 10.0
"""A worker without a report for this long is not ready: its event loop is blocked, or its process is stopped."""
UNRESTARTABLE_AFTER: Final = 3
"""Liveness fails after this many starts in a row that ended before the worker was ready."""
MAX_SERIES: Final = 50_000
"""Series of all workers that ever ran. Further series are counted under ``(other)``."""
_OTHER: Final = "(other)"
_ADDED_UP: Final = frozenset({"counter", "histogram"})
HIGHEST_OF_WORKERS: Final = frozenset(
    {
        "millstream_assignment_startup_recovery_streams",
        "millstream_assignment_startup_recovery_seconds",
        "millstream_retention_stream_length",
        "millstream_retention_held_back_entries",
    }
)
"""Gauges of which ``/metrics`` has the highest value of all workers. Every other gauge is summed."""


class SampleKey(NamedTuple):
    """A series: its family, its sample (the family of a histogram has several), and its labels."""

    family: str
    sample: str
    labels: tuple[tuple[str, str], ...]


class WorkerView(NamedTuple):
    number: int
    is_ready: bool
    is_up: bool
    """Its process runs, and its reports arrive."""
    pid: int | None
    starts: int
    deaths: int


@dataclass(slots=True)
class WorkerStatus:
    """The process that has this worker number now, and how earlier processes of the number ended."""

    number: int
    pid: int | None = None
    is_ready: bool = False
    not_ready: list[str] = field(default_factory=list)
    reported_at: float | None = None
    """Monotonic; None before the first report, and if workers send no reports."""
    starts: int = 0
    deaths: int = 0
    failed_starts: int = 0
    """Starts in a row without being ready in between. Those that failed for an outage of the broker do not count."""
    samples: dict[SampleKey, float] = field(default_factory=dict)
    """Reported by the process that runs now."""


class Fleet:
    """State of all workers: written by the supervisor, read by the HTTP port and for systemd. One thread uses it."""

    def __init__(self, processes: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._workers = {number: WorkerStatus(number) for number in range(1, processes + 1)}
        self._families: dict[str, tuple[str, str]] = {}
        """The kind and the help text of each metric."""
        self._past: dict[SampleKey, list[float]] = {}
        """Counts of workers that have ended, each as an exact sum (``_add_exactly``)."""
        self._known: set[SampleKey] = set()
        """The series that are not counted under ``(other)``."""
        self._topics: dict[str, None] = {}
        self._is_stopping = False

    # --- what the supervisor reports --------------------------------------------------------------------------------

    def worker_started(self, number: int, pid: int) -> None:
        worker = self._workers[number]
        worker.pid = pid
        worker.starts += 1
        worker.is_ready = False
        worker.not_ready = []
        worker.reported_at = None

    def worker_ready(self, number: int) -> None:
        worker = self._workers[number]
        worker.is_ready = True
        worker.failed_starts = 0

    def worker_reported(self, number: int, report: Mapping[str, Any]) -> None:
        """Applies a report of ``StatusReporter``. A malformed report is ignored: it must not end the supervisor."""
        worker = self._workers[number]
        try:
            if "ready" in report:
                worker.reported_at = self._now()
                worker.is_ready = bool(report["ready"])
                worker.not_ready = [str(name) for name in report["not_ready"]]
                for topic in report["topics"]:
                    if len(self._topics) < MAX_TOPICS:
                        self._topics.setdefault(str(topic))
                if worker.is_ready:
                    worker.failed_starts = 0
            for name, kind, text, samples in report.get("families", ()):
                self._families.setdefault(name, (kind, text))
                for sample, labels, value in samples:
                    key = SampleKey(name, sample, tuple(labels.items()))
                    reading = float(value)
                    if kind in _ADDED_UP and not math.isfinite(reading):
                        continue  # it would stay in the sum
                    worker.samples[key] = reading
                    self._series(key)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def _series(self, key: SampleKey) -> SampleKey:
        """The series of a sample. It is chosen with the first report of the sample, so that no counter decreases."""
        if key in self._known:
            return key
        if len(self._known) < MAX_SERIES:
            self._known.add(key)
            return key
        return key._replace(labels=tuple((name, value if name == "le" else _OTHER) for name, value in key.labels))

    def worker_exited(self, number: int) -> None:
        """Its process has ended; its last reports may still be in the pipe."""
        self._workers[number].pid = None

    def worker_ended(self, number: int, *, died: bool) -> None:
        """All its reports were received."""
        worker = self._workers[number]
        worker.pid = None
        worker.is_ready = False
        worker.not_ready = []
        worker.deaths += died
        for reported, value in worker.samples.items():
            if self._families[reported.family][0] in _ADDED_UP:
                _add_exactly(self._past.setdefault(self._series(reported), []), value)
        worker.samples = {}

    def start_failed(self, number: int) -> None:
        """The worker ended before it was ready, or could not be started. Not called for an outage of the broker."""
        self._workers[number].failed_starts += 1

    def stop(self) -> None:
        """Workers are draining: the service is not ready any more."""
        self._is_stopping = True

    # --- read by the HTTP port and systemd --------------------------------------------------------------------------

    @property
    def topics(self) -> list[str]:
        """The topics that workers read, as reported."""
        return list(self._topics)

    @property
    def is_ready(self) -> bool:
        return not self._is_stopping and not any(self._why_not_ready(worker) for worker in self._workers.values())

    def _why_not_ready(self, worker: WorkerStatus) -> list[str]:
        if worker.pid is None:
            return ["is not running"]
        if self._is_silent(worker):
            return [f"sent no report for {self._now() - (worker.reported_at or 0.0):.0f} s"]
        return [] if worker.is_ready else worker.not_ready or ["starts"]

    def _is_silent(self, worker: WorkerStatus) -> bool:
        return worker.reported_at is not None and self._now() - worker.reported_at > SILENT_AFTER_S

    def _unrestartable(self) -> list[WorkerStatus]:
        return [worker for worker in self._workers.values() if worker.failed_starts >= UNRESTARTABLE_AFTER]

    @property
    def is_alive(self) -> bool:
        """False while a worker cannot be restarted."""
        return not self._unrestartable()

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """For ``/ready``."""
        waiting = [
            {"name": f"worker {worker.number}", "not_ready": why}
            for worker in self._workers.values()
            if (why := self._why_not_ready(worker))
        ]
        return self.is_ready, {"not_ready": waiting, "workers": len(self._workers), "stopping": self._is_stopping}

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """For ``/health``."""
        failed = [
            {"name": f"worker {worker.number}", "failed_starts": worker.failed_starts}
            for worker in self._unrestartable()
        ]
        return not failed, {"failed": failed}

    def workers(self) -> list[WorkerView]:
        """The present state of each worker."""
        views = []
        for worker in self._workers.values():
            is_up = worker.pid is not None and not self._is_silent(worker)
            is_ready = not self._why_not_ready(worker)
            views.append(WorkerView(worker.number, is_ready, is_up, worker.pid, worker.starts, worker.deaths))
        return views

    @property
    def unrestartable(self) -> int:
        """The number of workers that cannot be restarted."""
        return len(self._unrestartable())

    def families(self) -> Iterator[tuple[str, str, str, list[tuple[SampleKey, float]]]]:
        """Name, kind, help text and aggregated samples of every metric that workers reported."""
        readings: dict[str, dict[SampleKey, list[float]]] = {name: {} for name in self._families}
        for past, values in self._past.items():
            readings[past.family][past] = values.copy()
        for worker in self._workers.values():
            for reported, value in worker.samples.items():
                key = self._series(reported)
                readings[key.family].setdefault(key, []).append(value)
        for name, (kind, text) in sorted(self._families.items()):
            # fsum rounds once, so a sum does not depend on which worker counted what, and grows with each of its parts.
            total = max if name in HIGHEST_OF_WORKERS else math.fsum if kind in _ADDED_UP else sum
            family = readings[name]
            yield name, kind, text, [(key, total(family[key])) for key in _in_order(family)]


def fleet_collector(processes: int) -> Collector:
    """The metrics of ``millstream run`` before a worker has started."""
    from millstream.runner.fleet_metrics import FleetCollector

    return FleetCollector(Fleet(processes))


def _add_exactly(partials: list[float], value: float) -> None:
    """Adds to an exact sum, which is kept as floats without common digits (Shewchuk's algorithm, as in ``math.fsum``).

    With a rounded sum, ``/metrics`` would show a counter that decreases by its last digit when a worker has ended.
    """
    used = 0
    for partial in partials:
        larger, smaller = (value, partial) if abs(value) > abs(partial) else (partial, value)
        value = larger + smaller
        if lost := smaller - (value - larger):
            partials[used] = lost
            used += 1
    partials[used:] = [value]


def _in_order(keys: Iterable[SampleKey]) -> list[SampleKey]:
    """Sorted by series; the buckets of a histogram by size, then its count and sum."""

    def order(key: SampleKey) -> tuple[Any, ...]:
        labels = dict(key.labels)
        bound = labels.pop("le", None)
        return tuple(labels.items()), bound is None, float(bound or 0), key.sample

    return sorted(keys, key=order)
