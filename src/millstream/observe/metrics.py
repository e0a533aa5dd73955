"""Prometheus metrics: registry, bounded series for observer events, and the collector of stream stats.

Each package's observer handles the events that it knows and ignores the others, so that several observers can receive
all events. Stream stats are read from the broker for a scrape, but not more often than configured. Their metric names
are those of redis_exporter with the prefix ``millstream_``. The number of streams, groups and consumers is bounded; a
metric counts those that were left out. If the server cannot be reached, no old values are exposed: ``survey_up`` is 0.
The exposition of prometheus-client escapes label values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from millstream.broker import Broker
from millstream.broker.operations.info import GroupStats, StreamStats, read_stream_stats
from millstream.errors import InvalidArgument, MillstreamError, PermissionDenied
from millstream.model import ConsumerInfo, GroupInfo, Observer
from millstream.model.policies import guarded
from millstream.observe.format import escape
from millstream.wire import to_bytes

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Exposition:
    """A registry separate from the process-wide one, so that two services in one process do not share series."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def combine_observers(observers: Sequence[Observer]) -> Observer:
    """Return an observer that passes each event to all of the given ones."""

    independent = [guarded(observer) for observer in observers]

    def combined(name: str, /, **fields: Any) -> None:
        for observer in independent:
            observer(name, **fields)

    return combined


MAX_LABEL = 120
MAX_SERIES = 500
OTHER = "(other)"
"""The label value of everything above ``MAX_SERIES``."""


def label(value: object) -> str:
    """Convert a value to a printable label: control characters and invalid UTF-8 are escaped, long values are cut.

    A cut value ends with a digest of the whole value, so that long values with the same prefix stay distinct.
    """
    name = "" if value is None else str(value)
    if len(name) <= MAX_LABEL and name.isprintable():
        return name
    escaped = "".join(char if char.isprintable() else escape(char) for char in name)
    if len(escaped) <= MAX_LABEL:
        return escaped
    return f"{escaped[: MAX_LABEL - 17]}~{blake2b(to_bytes(name), digest_size=8).hexdigest()}"


class Labelled(Protocol):
    """A metric of prometheus-client."""

    def labels(self, *values: str) -> Self: ...


M = TypeVar("M", bound=Labelled)


class Series(Generic[M]):
    """A metric whose label values are fields of an observer event. Its children are cached, for speed."""

    def __init__(self, metric: M, names: Sequence[str], *, max_series: int = MAX_SERIES) -> None:
        self._metric = metric
        self._names = tuple(names)
        self._max_series = max_series
        self._children: dict[tuple[Any, ...], M] = {}
        self._other: M | None = None

    def of(self, fields: Mapping[str, Any]) -> M:
        """Return the child for the fields of an event; a missing field becomes an empty label."""
        values = tuple([fields.get(name) for name in self._names])
        child = self._children.get(values)
        return self._add(values) if child is None else child

    def _add(self, values: tuple[Any, ...]) -> M:
        if not self._names:
            child = self._metric
        elif len(self._children) < self._max_series:
            child = self._metric.labels(*map(label, values))
        else:
            # Not cached: otherwise an unbounded number of names would fill the memory of this process.
            self._other = self._other or self._metric.labels(*[OTHER] * len(self._names))
            return self._other
        self._children[values] = child
        return child


MAX_STREAMS = 200
MAX_GROUPS = 1000
MAX_CONSUMERS = 1000
MIN_REFRESH_INTERVAL_S = 5.0
REFRESH_TIMEOUT_S = 5.0
"""Below the ten seconds that a scraper waits by default, so that it receives the other metrics if the server hangs."""


class CollectedStats(NamedTuple):
    """One reading of stream stats. ``consumers`` is filled if series per consumer are enabled."""

    up: bool = False
    now_ms: int = 0
    streams: Sequence[StreamStats] = ()
    groups: Sequence[tuple[str, GroupStats]] = ()
    consumers: Sequence[tuple[str, str, ConsumerInfo]] = ()
    left_out: Mapping[str, int] = {"streams": 0, "groups": 0, "consumers": 0}
    seconds: float = 0.0
    memory: Sequence[int] = ()
    """Used and allowed bytes of the server; empty if the server does not report them."""


class StreamStatsCollector(Collector):
    """A collector of stream stats. Register it, and ``await refresh()`` on the broker's loop before each exposition."""

    def __init__(
        self,
        broker: Broker,
        streams: Sequence[str],
        *,
        per_consumer: bool = False,
        max_streams: int = MAX_STREAMS,
        every_s: float = MIN_REFRESH_INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not streams:
            raise InvalidArgument("streams", streams, "at least one stream, or a glob such as 'orders*'")
        self._broker = broker
        self._streams = tuple(streams)
        self._per_consumer = per_consumer
        self._max_streams = max_streams
        self._min_interval_s = every_s
        self._now = now
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._stats = CollectedStats()
        self._can_read_memory = True

    async def refresh(self) -> None:
        """Read the stats, unless the last reading is recent: many scrapers do not increase the load of the server."""
        async with self._refreshing:
            began = self._now()
            if began - self._refreshed_at < self._min_interval_s:
                return
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT_S):
                    self._stats = (await self._read_stats())._replace(seconds=self._now() - began)
            except (MillstreamError, TimeoutError):
                self._stats = CollectedStats(seconds=self._now() - began)
            self._refreshed_at = self._now()

    async def _read_stats(self) -> CollectedStats:
        names = await self._names()
        selected = names[: self._max_streams]
        streams = await self._broker.run(read_stream_stats, selected)
        groups = [(stream.name, group) for stream in streams for group in stream.groups]
        consumers = []
        if self._per_consumer:
            for stream in streams:
                for group in await self._groups(stream.name):
                    consumers += [(stream.name, group.name, consumer) for consumer in group.consumers]
        left_out = {
            "streams": len(names) - len(selected),
            "groups": max(0, len(groups) - MAX_GROUPS),
            "consumers": max(0, len(consumers) - MAX_CONSUMERS),
        }
        now_ms = await self._broker.server_time_ms()
        memory = await self._memory()
        return CollectedStats(
            True, now_ms, streams, groups[:MAX_GROUPS], consumers[:MAX_CONSUMERS], left_out, memory=memory
        )

    async def _memory(self) -> Sequence[int]:
        """Return used_memory and maxmemory; empty if unknown. A refusal is not retried: each adds to the ACL log."""
        if not self._can_read_memory:
            return ()
        try:
            info = await self._broker.server_info("memory")
        except PermissionDenied:
            self._can_read_memory = False
            return ()
        sizes = [info.get(name, "") for name in ("used_memory", "maxmemory")]
        return [int(size) for size in sizes] if all(size.isdecimal() for size in sizes) else ()

    async def _names(self) -> list[str]:
        names: set[str] = set()
        for name in self._streams:
            names.update(await self._broker.list_streams(name) if any(char in name for char in "*?[") else [name])
        return sorted(names)

    async def _groups(self, stream: str) -> list[GroupInfo]:
        try:
            return await self._broker.group_info(stream)
        except MillstreamError:
            return []  # the stream was deleted meanwhile

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats = self._stats
        yield _gauge("survey_up", "1: the last reading of the stream stats succeeded.", [], [((), int(stats.up))])
        yield _gauge("survey_seconds", "Duration of the last reading of the stream stats.", [], [((), stats.seconds)])
        left_out = [((kind,), count) for kind, count in stats.left_out.items()]
        yield _gauge("survey_left_out", "Streams, groups and consumers above the limits.", ["what"], left_out)
        used, limit = stats.memory or (None, None)
        yield _gauge("server_memory_bytes", "Memory that the server uses.", [], [((), used)] if used else [])
        limits = [((), limit)] if limit else []
        yield _gauge("server_memory_limit_bytes", "maxmemory of the server, if it is set.", [], limits)
        yield from self._of_streams(stats)
        yield from self._of_groups(stats)
        if self._per_consumer:
            yield from self._of_consumers(stats)

    @staticmethod
    def _of_streams(stats: CollectedStats) -> Iterator[GaugeMetricFamily]:
        names = ["stream"]
        streams = stats.streams
        rows = [((stream.name,), stream.length) for stream in streams]
        yield _gauge("stream_length", "Entries in the stream.", names, rows)
        rows = [((stream.name,), stream.entries_added) for stream in streams if stream.entries_added is not None]
        yield _gauge("stream_entries_added", "Entries ever added.", names, rows)
        rows = [((stream.name,), len(stream.groups)) for stream in streams]
        yield _gauge("stream_groups", "Groups of the stream.", names, rows)
        rows = [((stream.name,), stream.memory_bytes) for stream in streams if stream.memory_bytes is not None]
        yield _gauge("stream_memory_bytes", "Memory of the stream, from MEMORY USAGE.", names, rows)

    @staticmethod
    def _of_groups(stats: CollectedStats) -> Iterator[GaugeMetricFamily]:
        names = ["stream", "group"]
        groups = [((stream, group.name), group) for stream, group in stats.groups]
        stats_by_stream = {stream.name: stream for stream in stats.streams}
        assigning = {(stream, group) for (stream, group), _ in groups if stats_by_stream[stream].assigns_streams(group)}
        rows = [(key, group.consumers) for key, group in groups]
        yield _gauge("stream_group_consumers", "Consumers of the group.", names, rows)
        rows = [(key, group.pending) for key, group in groups if key not in assigning]
        yield _gauge("stream_group_messages_pending", "Entries delivered and not acknowledged.", names, rows)
        # A pending entry of a load-balancer stream is a data stream with an owner, not a waiting message.
        rows = [(key, group.pending) for key, group in groups if key in assigning]
        yield _gauge("stream_group_assigned_streams", "Data streams that members of the service own.", names, rows)
        # After a trim or SETID the server may not know the lag. Then no value is exposed.
        rows = [(key, group.lag) for key, group in groups if group.lag is not None]
        yield _gauge("stream_group_lag", "Entries not yet delivered to the group.", names, rows)
        ages = [
            (key, max(0, stats.now_ms - group.oldest_pending.ms) / 1000 if group.oldest_pending else 0.0)
            for key, group in groups
            if key not in assigning
        ]
        yield _gauge("stream_group_oldest_pending_seconds", "Age of the oldest pending entry.", names, ages)

    @staticmethod
    def _of_consumers(stats: CollectedStats) -> Iterator[GaugeMetricFamily]:
        names = ["stream", "group", "consumer"]
        consumers = [((stream, group, consumer.name), consumer) for stream, group, consumer in stats.consumers]
        pending = [(key, consumer.pending) for key, consumer in consumers]
        yield _gauge("stream_group_consumer_messages_pending", "Pending entries of the consumer.", names, pending)
        idle = [(key, consumer.idle_ms / 1000) for key, consumer in consumers]
        yield _gauge("stream_group_consumer_idle_seconds", "Time since the consumer last read or claimed.", names, idle)


def _gauge(
    name: str, text: str, labels: Sequence[str], rows: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"millstream_{name}", text, labels=labels)
    samples: dict[tuple[str, ...], float] = {}
    for key, value in rows:
        # Two names may map to the same label. A duplicate series would make the whole exposition invalid.
        samples[tuple(map(label, key))] = value
    for key, value in samples.items():
        family.add_metric(key, value)
    return family
