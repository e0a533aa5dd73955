"""Reports of a worker process to its supervisor: whether it reads, and its metrics.

The reports are lines of JSON in a pipe of their own. The worker never waits for the pipe: while the supervisor does not
read (it is stopped, or slow), the pipe is full and reports are skipped. A report contains the samples that changed with
their totals, so the next report replaces a skipped one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry

from millstream.observe import ServiceMetrics
from millstream.observe.metrics import label
from millstream.runner.fleet import MAX_TOPICS, SampleKey

REPORT_EVERY_S: Final = 0.5
"""The interval while nothing is counted."""
REPORT_SOON_S: Final = 0.05
"""The delay after something was counted. When a worker is killed, what it has not reported is missing in the sums."""
MAX_CPU_SHARE: Final = 0.02
"""The share of the worker's time for reports. With many series, reports are less frequent."""
MAX_SAMPLES_PER_LINE: Final = 500
MAX_NOT_READY: Final = 20
CLOSE_TIMEOUT_S: Final = 1.0


class StatusReporter:
    """Observer of a worker's broker, and the task that reports. ``fd``: the write end of the pipe."""

    def __init__(self, fd: int, *, every_s: float = REPORT_EVERY_S) -> None:
        self._fd = fd
        self._every_s = every_s
        self._registry = CollectorRegistry()
        self._metrics = ServiceMetrics(self._registry)
        self._reported: dict[SampleKey, float] = {}
        self._topics: dict[str, None] = {}
        self._named_topics = 0
        self._transport: asyncio.WriteTransport | None = None
        self._pipe = _Pipe()
        self._task: asyncio.Task[None] | None = None
        self._parts: Sequence[object] = ()
        self._has_counted = False

    def __call__(self, name: str, /, **values: Any) -> None:
        self._metrics.count(name, values)
        self._has_counted = True
        if name == "messaging.subscribed" and len(self._topics) < MAX_TOPICS:
            self._topics.setdefault(str(values.get("topic")))

    async def start(self, parts: Sequence[object]) -> None:
        """``parts`` are what runs: routers, buses, subscribers."""
        self._parts = parts
        loop = asyncio.get_running_loop()
        os.set_blocking(self._fd, False)
        pipe = os.fdopen(self._fd, "wb", buffering=0)
        self._transport, _ = await loop.connect_write_pipe(lambda: self._pipe, pipe)
        self._task = asyncio.create_task(self._run(), name="millstream status")

    async def close(self) -> None:
        """Sends a last report, and waits CLOSE_TIMEOUT_S at most until it is written."""
        if self._task is None or self._transport is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._report(is_closing=True)
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pipe.lost.wait()
        except TimeoutError:
            self._transport.abort()

    async def _run(self) -> None:
        reported_at = float("-inf")
        while not self._pipe.lost.is_set():
            cpu_s = 0.0
            if self._has_counted or time.monotonic() - reported_at >= self._every_s:
                self._has_counted = False
                reported_at = time.monotonic()
                began = time.thread_time()
                self._report()
                cpu_s = time.thread_time() - began
            await asyncio.sleep(max(min(REPORT_SOON_S, self._every_s), cpu_s / MAX_CPU_SHARE))

    def _report(self, *, is_closing: bool = False) -> None:
        transport = self._transport
        assert transport is not None
        if transport.is_closing() or (transport.get_write_buffer_size() and not is_closing):
            return
        waiting = not_ready(self._parts)
        topics = list(self._topics)[self._named_topics :]
        self._named_topics += len(topics)
        head = {"ready": not waiting and not is_closing, "not_ready": waiting[:MAX_NOT_READY], "topics": topics}
        self._write(transport, head)
        for families in self._changed():
            self._write(transport, {"families": families})

    @staticmethod
    def _write(transport: asyncio.WriteTransport, report: Mapping[str, Any]) -> None:
        transport.write(json.dumps(report).encode() + b"\n")

    def _changed(self) -> Iterator[list[list[Any]]]:
        """Pages of families with the samples that changed since the last report."""
        page: list[list[Any]] = []
        count = 0
        for family in self._registry.collect():
            samples: list[list[Any]] = []
            for sample in family.samples:
                key = SampleKey(family.name, sample.name, tuple(sample.labels.items()))
                if sample.name.endswith("_created") or self._reported.get(key) == sample.value:
                    continue
                self._reported[key] = sample.value
                samples.append([sample.name, sample.labels, sample.value])
            for first in range(0, len(samples), MAX_SAMPLES_PER_LINE):
                part = samples[first : first + MAX_SAMPLES_PER_LINE]
                page.append([family.name, family.type, family.documentation, part])
                count += len(part)
                if count >= MAX_SAMPLES_PER_LINE:
                    yield page
                    page, count = [], 0
        if page:
            yield page


class _Pipe(asyncio.BaseProtocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


def not_ready(parts: Sequence[object]) -> list[str]:
    """Names of the parts that do not read; of a router, the names of its handlers that do not."""
    names: list[str] = []
    for part in parts:
        if getattr(part, "ready", True):
            continue
        readiness: Mapping[str, bool] = getattr(part, "readiness", {})
        waiting = [label(name) for name, is_ready in readiness.items() if not is_ready]
        names += waiting or [label(type(part).__name__)]
    return names
