"""Metrics, health and readiness of one service: the monitor is the broker's observer, and watches routers, tasks, ...

Observer events become metrics. Readiness is checked when a probe arrives. Health fails after an event that reports a
failed subscription, until that subscription is joined again. A probe shows the network names and classes of errors, and
never the text of an error, which may contain data; the log has it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeGuard

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette

from millstream.broker import Broker
from millstream.errors import InvalidArgument, MillstreamError, StaleOwner
from millstream.messaging import Middleware
from millstream.messaging.middleware import metrics
from millstream.observe.metrics import (
    MAX_SERIES,
    MAX_STREAMS,
    MIN_REFRESH_INTERVAL_S,
    Exposition,
    StreamStatsCollector,
    label,
)
from millstream.observe.service_http import LOOPBACK, LoopServer, service_app
from millstream.observe.service_metrics import ServiceMetrics

CHECK_TIMEOUT_S = 2.0
"""The time limit for one check, such as a ping of the broker."""
MAX_FAILURES = 100


class Readable(Protocol):
    """A subscriber, a router, a publisher, a member, or another object with the attribute ``ready``."""

    @property
    def ready(self) -> bool: ...


Check = Callable[[], bool | Awaitable[bool]]
"""A condition that the service defines. If it raises, the service is not ready."""
Watched = Readable | Broker | asyncio.Future[Any] | Check


class HealthStatus(NamedTuple):
    """The status of one watched object. ``parts``: the names of its parts that are not ready. ``error``: the name of a
    class."""

    name: str
    ready: bool
    failed: bool = False
    error: str | None = None
    parts: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"name": self.name, "ready": self.ready}
        if self.failed:
            document["failed"] = True
        if self.error is not None:
            document["error"] = self.error
        if self.parts:
            document["not_ready"] = list(self.parts)
        return document


def is_readable(thing: object) -> TypeGuard[Readable]:
    """Whether the object has ``ready``. The attribute is not read: some objects need a running loop for that."""
    return inspect.getattr_static(thing, "ready", None) is not None


def check_watched(thing: object) -> Watched:
    if isinstance(thing, (Broker, asyncio.Future)) or is_readable(thing) or callable(thing):
        return thing
    raise InvalidArgument(
        "watch",
        thing,
        "a Subscriber, Router, Publisher, AssignmentClient, Broker, task, or a function that returns a bool",
    )


def name_of(thing: object) -> str:
    """A readable name: ``router``, ``subscriber of billing``. It becomes a label, so it contains no id that changes
    with a restart."""
    if isinstance(thing, asyncio.Task):
        return label(f"task {thing.get_name()}")
    if inspect.isroutine(thing):
        return label(thing.__name__)
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(thing).__name__).lower()
    group = getattr(getattr(thing, "settings", None), "group", None)
    return label(f"{kind} of {group}" if group else kind)


async def health_of(name: str, thing: Watched) -> HealthStatus:
    """Checks the object, on its own loop. Never raises, and never waits for longer than CHECK_TIMEOUT_S."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await _check(name, thing)
    except TimeoutError:
        return HealthStatus(name, False, error="TimeoutError")
    except Exception as error:  # of the program's own object: reported as unhealthy
        return HealthStatus(name, False, error=type(error).__name__)


async def _check(name: str, thing: Watched) -> HealthStatus:
    if isinstance(thing, Broker):
        await thing.ping()
        return HealthStatus(name, True)
    if isinstance(thing, asyncio.Future):
        return _of_task(name, thing)
    if is_readable(thing):
        readiness: Mapping[str, bool] = getattr(thing, "readiness", {})
        return HealthStatus(
            name, thing.ready, parts=sorted(label(part) for part, ready in readiness.items() if not ready)
        )
    assert callable(thing)
    answer = thing()
    return HealthStatus(name, bool(await answer if isinstance(answer, Awaitable) else answer))


def _of_task(name: str, task: asyncio.Future[Any]) -> HealthStatus:
    if not task.done():
        return HealthStatus(name, True)
    error = None if task.cancelled() else task.exception()
    return HealthStatus(name, False, failed=error is not None, error=None if error is None else type(error).__name__)


class Failures:
    """An observer that keeps the subscriptions that ended with an error, until they are joined again.

    A stream that this member no longer owns is removed: another member reads it.
    """

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str, str], str] = {}

    def __call__(self, name: str, /, **values: Any) -> None:
        self.note(name, values)

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """As ``__call__``, with the values as a mapping."""
        if name == "messaging.subscription_failed":
            error = str(values.get("error_type", MillstreamError.__name__))
            # StaleOwner: another member owns the stream and reads it.
            if len(self._failed) < MAX_FAILURES and error != StaleOwner.__name__:
                self._failed[_subscription(values)] = error
        elif name in ("messaging.subscribed", "assignment.unsubscribed"):
            self._failed.pop(_subscription(values), None)

    def statuses(self) -> list[HealthStatus]:
        return [
            HealthStatus(label(f"subscription {topic} of group {group}"), False, failed=True, error=error)
            for (topic, group, _), error in self._failed.items()
        ]


def _subscription(values: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(values.get("topic")), str(values.get("group")), str(values.get("consumer"))


PORT = 9100


class ServiceMonitor:
    """Metrics, health and readiness of one service, over HTTP if a port is given.

        monitor = ServiceMonitor(port=9100)
        async with open_broker(url, observer=monitor) as broker:
            ...
            async with monitor.watch(router, broker):
                await router.run()

    It is an observer. ``port=None``: no HTTP; mount ``monitor.app`` in an application of your own. Addresses other than
    loopback require a ``token``. ``per_consumer``: adds series for each consumer and member, which may be many.
    """

    def __init__(
        self,
        *,
        port: int | None = PORT,
        host: str = LOOPBACK,
        token: str | None = None,
        per_consumer: bool = False,
        max_series: int = MAX_SERIES,
    ) -> None:
        self._exposition = Exposition()
        self._per_consumer = per_consumer
        self._failures = Failures()
        self._metrics = ServiceMetrics(self.registry, per_consumer=per_consumer, max_series=max_series)
        self._watched: dict[str, Watched] = {}
        self._stream_collectors: list[StreamStatsCollector] = []
        self._statuses = _HealthMetrics()
        self.registry.register(self._statuses)
        self.app: Starlette = service_app(metrics=self.exposition, health=self.health, ready=self.ready, token=token)
        """The ASGI application, to be mounted elsewhere. It must run on the loop of the watched objects."""
        self._server = None if port is None else LoopServer(self.app, host=host, port=port, token=token)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, to which a service can add metrics of its own."""
        return self._exposition.registry

    @property
    def port(self) -> int | None:
        """The port; with ``port=0`` the actual one after the start."""
        return None if self._server is None else self._server.port

    # --- input ------------------------------------------------------------------------------------------------------

    def __call__(self, name: str, /, **values: Any) -> None:
        self._metrics.count(name, values)
        self._failures.note(name, values)

    def timings(self) -> Middleware:
        """Middleware for ``router.use`` that measures how long each handler takes and how it ends. It costs some
        microseconds per message."""
        return metrics(self)

    def watch(self, *things: Watched, **named: Watched) -> Self:
        """Watches subscribers, routers, publishers, members, brokers, tasks, and functions that return a bool.

        The service is ready if all of them are. A broker is checked with a ping.
        """
        for thing in things:
            self._add(name_of(thing), check_watched(thing))
        for name, thing in named.items():
            self._add(name, check_watched(thing))
        return self

    def _add(self, name: str, thing: Watched) -> None:
        unique, number = name, 1
        while unique in self._watched:
            number += 1
            unique = f"{name} ({number})"
        self._watched[unique] = thing

    def watch_streams(
        self, broker: Broker, *streams: str, max_streams: int = MAX_STREAMS, every_s: float = MIN_REFRESH_INTERVAL_S
    ) -> Self:
        """Adds length, lag and pending of these streams (or globs), read from the broker when a scraper arrives, at
        most every ``every_s``. Call it once per service: a second call would expose the same series twice."""
        if self._stream_collectors:
            raise InvalidArgument("watch_streams", streams, "all streams in one call: the series exist once")
        collector = StreamStatsCollector(
            broker, streams, per_consumer=self._per_consumer, max_streams=max_streams, every_s=every_s
        )
        self._stream_collectors.append(collector)
        self.registry.register(collector)
        return self

    # --- output -----------------------------------------------------------------------------------------------------

    async def statuses(self) -> list[HealthStatus]:
        """The status of every watched object, and the subscriptions that have failed."""
        watched = await asyncio.gather(*(health_of(name, thing) for name, thing in self._watched.items()))
        return [*watched, *self._failures.statuses()]

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Fails while a subscription or a task has ended with an error and was not started again."""
        failed = [status.as_json() for status in await self.statuses() if status.failed]
        return not failed, {"failed": failed}

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready while every watched object is ready. A service that watches nothing is ready."""
        statuses = await self.statuses()
        waiting = [status.as_json() for status in statuses if not status.ready]
        return not waiting, {"not_ready": waiting, "watched": [status.name for status in statuses]}

    async def exposition(self) -> tuple[bytes, str]:
        """All metrics, in Prometheus's text format, and its content type."""
        for collector in self._stream_collectors:
            await collector.refresh()
        self._statuses.update(await self.statuses(), self._watched)
        return self._exposition.text(), self._exposition.content_type

    # --- start and stop ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._server is not None:
            await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class _HealthMetrics(Collector):
    """Gauges of the watched objects, updated before each exposition."""

    def __init__(self) -> None:
        self._families: list[GaugeMetricFamily] = []
        self.update([], {})

    def update(self, statuses: list[HealthStatus], watched: dict[str, Watched]) -> None:
        ready = GaugeMetricFamily("millstream_ready", "1: what is watched is ready.", labels=["what"])
        for status in statuses:
            ready.add_metric([label(status.name)], int(status.ready))
        self._families = [
            ready,
            GaugeMetricFamily(
                "millstream_failed",
                "Watched things and subscriptions that have failed.",
                value=sum(status.failed for status in statuses),
            ),
            GaugeMetricFamily(
                "millstream_publisher_buffered_messages",
                "Messages accepted by a publisher and not stored yet.",
                value=sum(getattr(thing, "buffered", 0) for thing in watched.values()),
            ),
            GaugeMetricFamily(
                "millstream_assignment_owned_streams", "Streams that watched members own.", value=_owned(watched)
            ),
        ]

    def collect(self) -> list[GaugeMetricFamily]:
        return self._families


def _owned(watched: dict[str, Watched]) -> int:
    members = [getattr(thing, "client", thing) for thing in watched.values()]
    return sum(len(getattr(member, "owned", ())) for member in members)
