"""The metrics of all workers as Prometheus collects them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millstream.observe.metrics import label
from millstream.runner.fleet import Fleet


class FleetCollector(Collector):
    """The sums of what workers reported, and the state of their processes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        yield from self._of_workers()
        for name, kind, text, samples in self._fleet.families():
            metric = Metric(name, text, kind)
            for key, value in samples:
                metric.add_sample(key.sample, dict(key.labels), value)
            yield metric

    def _of_workers(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("millstream_ready", "1: what is watched is ready.", labels=["what"])
        up = GaugeMetricFamily("millstream_worker_up", "1: the worker process runs and reports.", labels=["worker"])
        memory = GaugeMetricFamily(
            "millstream_worker_memory_bytes", "Resident memory of the worker process.", labels=["worker"]
        )
        starts = CounterMetricFamily(
            "millstream_worker_starts", "Worker processes that were started.", labels=["worker"]
        )
        deaths = CounterMetricFamily(
            "millstream_worker_deaths", "Worker processes that ended unexpectedly.", labels=["worker"]
        )
        for worker in self._fleet.workers():
            number = [str(worker.number)]
            ready.add_metric([label(f"worker {worker.number}")], int(worker.is_ready))
            up.add_metric(number, int(worker.is_up))
            if worker.pid is not None and (resident := resident_bytes(worker.pid)) is not None:
                memory.add_metric(number, resident)
            starts.add_metric(number, worker.starts)
            deaths.add_metric(number, worker.deaths)
        failed = GaugeMetricFamily(
            "millstream_failed", "Watched things and subscriptions that have failed.", value=self._fleet.unrestartable
        )
        yield from (ready, failed, up, memory, starts, deaths)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None if it is not readable (the process has ended, or this is not Linux)."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
