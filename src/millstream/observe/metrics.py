"""Metrics for Prometheus: a registry, series by facts, and streams and groups as an operator counts them.

Observers are told facts and never ask; a room's observer takes the facts it knows and ignores the others, so that
several can hang on one stream of facts. Streams are asked of the broker when a scraper comes, not more often than
that; their names are those of redis_exporter, under ``millstream_``. Bounded: so many streams, groups and consumers,
the first by name, and how many were left out is a metric too. A server that cannot be asked leaves no old figures
behind: ``survey_up`` is 0. Label values are data: Prometheus's own exposition escapes them.
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

from millstream.broker import Broker, GroupSurvey, StreamSurvey, survey
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import ConsumerInfo, GroupInfo, Observer
from millstream.observe.format import escape
from millstream.wire import to_bytes

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Exposition:
    """A registry of its own, not the process's: two services in one process do not share series."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def together(observers: Sequence[Observer]) -> Observer:
    """One observer that tells all of them."""

    def observer(name: str, /, **facts: Any) -> None:
        for one in observers:
            one(name, **facts)

    return observer


MAX_LABEL = 120
MAX_SERIES = 500
OTHER = "(other)"
"""The label of everything for which there was no room."""


def label(value: object) -> str:
    """The name, readable and harmless: control characters and bytes that are not UTF-8 as escapes, long ones cut.

    A cut name ends in a digest of the whole: two long names that begin alike stay two.
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
    """A metric whose labels are taken from facts by name. Remembers its children, for a fact costs a lookup then."""

    def __init__(self, metric: M, names: Sequence[str], *, max_series: int = MAX_SERIES) -> None:
        self._metric = metric
        self._names = tuple(names)
        self._max_series = max_series
        self._children: dict[tuple[Any, ...], M] = {}
        self._other: M | None = None

    def of(self, facts: Mapping[str, Any]) -> M:
        """The child for these facts; a label that they do not have is empty."""
        values = tuple([facts.get(name) for name in self._names])
        child = self._children.get(values)
        return self._add(values) if child is None else child

    def _add(self, values: tuple[Any, ...]) -> M:
        if not self._names:
            child = self._metric
        elif len(self._children) < self._max_series:
            child = self._metric.labels(*map(label, values))
        else:
            # Not remembered: else whoever makes names up would fill our memory instead of Prometheus's.
            self._other = self._other or self._metric.labels(*[OTHER] * len(self._names))
            return self._other
        self._children[values] = child
        return child


MAX_STREAMS = 200
MAX_GROUPS = 1000
MAX_CONSUMERS = 1000
EVERY_S = 5.0
PATIENCE_S = 5.0
"""A scraper waits for ten seconds by default: it shall get the rest of the metrics even if the server hangs."""


class Found(NamedTuple):
    """One survey. ``consumers`` is filled where series by consumer are asked for."""

    up: bool = False
    now_ms: int = 0
    streams: Sequence[StreamSurvey] = ()
    groups: Sequence[tuple[str, GroupSurvey]] = ()
    consumers: Sequence[tuple[str, str, ConsumerInfo]] = ()
    left_out: Mapping[str, int] = {"streams": 0, "groups": 0, "consumers": 0}
    seconds: float = 0.0


class StreamSurveyor(Collector):
    """Register it, and ``await refresh()`` on the broker's loop before each exposition."""

    def __init__(
        self,
        broker: Broker,
        streams: Sequence[str],
        *,
        per_consumer: bool = False,
        max_streams: int = MAX_STREAMS,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not streams:
            raise InvalidArgument("streams", streams, "at least one stream, or a glob such as 'orders*'")
        self._broker = broker
        self._streams = tuple(streams)
        self._per_consumer = per_consumer
        self._max_streams = max_streams
        self._every_s = every_s
        self._now = now
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._found = Found()

    async def refresh(self) -> None:
        """Asks, unless it was asked just now: however many scrapers come, the server is surveyed at its pace."""
        async with self._asking:
            began = self._now()
            if began - self._asked_at < self._every_s:
                return
            try:
                async with asyncio.timeout(PATIENCE_S):
                    self._found = (await self._survey())._replace(seconds=self._now() - began)
            except (MillstreamError, TimeoutError):
                self._found = Found(seconds=self._now() - began)
            self._asked_at = self._now()

    async def _survey(self) -> Found:
        names = await self._names()
        chosen = names[: self._max_streams]
        streams = await self._broker.run(survey, chosen)
        groups = [(stream.name, group) for stream in streams for group in stream.groups]
        consumers = []
        if self._per_consumer:
            for stream in streams:
                for group in await self._groups(stream.name):
                    consumers += [(stream.name, group.name, consumer) for consumer in group.consumers]
        left_out = {
            "streams": len(names) - len(chosen),
            "groups": max(0, len(groups) - MAX_GROUPS),
            "consumers": max(0, len(consumers) - MAX_CONSUMERS),
        }
        now_ms = await self._broker.server_time_ms()
        return Found(True, now_ms, streams, groups[:MAX_GROUPS], consumers[:MAX_CONSUMERS], left_out)

    async def _names(self) -> list[str]:
        found: set[str] = set()
        for name in self._streams:
            found.update(await self._broker.list_streams(name) if any(sign in name for sign in "*?[") else [name])
        return sorted(found)

    async def _groups(self, stream: str) -> list[GroupInfo]:
        try:
            return await self._broker.group_info(stream)
        except MillstreamError:
            return []  # it was deleted since it was surveyed

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = self._found
        yield _gauge("survey_up", "1: the broker answered the last survey.", [], [((), int(found.up))])
        yield _gauge("survey_seconds", "Time that the last survey took.", [], [((), found.seconds)])
        left_out = [((what,), count) for what, count in found.left_out.items()]
        yield _gauge("survey_left_out", "What there was no room for, by kind.", ["what"], left_out)
        yield from self._of_streams(found)
        yield from self._of_groups(found)
        if self._per_consumer:
            yield from self._of_consumers(found)

    @staticmethod
    def _of_streams(found: Found) -> Iterator[GaugeMetricFamily]:
        names = ["stream"]
        streams = found.streams
        rows = [((one.name,), one.length) for one in streams]
        yield _gauge("stream_length", "Entries in the stream.", names, rows)
        rows = [((one.name,), one.entries_added) for one in streams if one.entries_added is not None]
        yield _gauge("stream_entries_added", "Entries ever added.", names, rows)
        rows = [((one.name,), len(one.groups)) for one in streams]
        yield _gauge("stream_groups", "Groups of the stream.", names, rows)
        rows = [((one.name,), one.memory_bytes) for one in streams if one.memory_bytes is not None]
        yield _gauge("stream_memory_bytes", "Memory of the stream, as the server reckons it.", names, rows)

    @staticmethod
    def _of_groups(found: Found) -> Iterator[GaugeMetricFamily]:
        names = ["stream", "group"]
        groups = [((stream, group.name), group) for stream, group in found.groups]
        rows = [(key, group.consumers) for key, group in groups]
        yield _gauge("stream_group_consumers", "Consumers of the group.", names, rows)
        rows = [(key, group.pending) for key, group in groups]
        yield _gauge("stream_group_messages_pending", "Handed out and not acknowledged.", names, rows)
        # After a trim or a SETID the server does not know: better no figure than a wrong one.
        rows = [(key, group.lag) for key, group in groups if group.lag is not None]
        yield _gauge("stream_group_lag", "Entries that the group has still to be handed.", names, rows)
        ages = [
            (key, max(0, found.now_ms - group.oldest_pending.ms) / 1000 if group.oldest_pending else 0.0)
            for key, group in groups
        ]
        yield _gauge("stream_group_oldest_pending_seconds", "Age of the oldest pending entry.", names, ages)

    @staticmethod
    def _of_consumers(found: Found) -> Iterator[GaugeMetricFamily]:
        names = ["stream", "group", "consumer"]
        consumers = [((stream, group, one.name), one) for stream, group, one in found.consumers]
        pending = [(key, one.pending) for key, one in consumers]
        yield _gauge("stream_group_consumer_messages_pending", "Held by the consumer.", names, pending)
        idle = [(key, one.idle_ms / 1000) for key, one in consumers]
        yield _gauge("stream_group_consumer_idle_seconds", "Since the consumer last asked.", names, idle)


def _gauge(
    name: str, text: str, labels: Sequence[str], rows: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"millstream_{name}", text, labels=labels)
    shown: dict[tuple[str, ...], float] = {}
    for key, value in rows:
        # Two names may look alike as labels; one series twice would spoil the whole exposition.
        shown[tuple(map(label, key))] = value
    for key, value in shown.items():
        family.add_metric(key, value)
    return family
