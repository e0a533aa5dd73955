"""What a service shows of itself: give the monitor to the broker as its observer, and let it watch what runs.

It is told facts and turns them into metrics; it asks what it watches whether it is ready, when a probe comes. Failed is
told, by facts, and taken back when reading begins again. No text of an error is kept: what a probe shows to the network
is a name and the class of an error, and the log has the rest.
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
from millstream.errors import InvalidArgument, MillstreamError
from millstream.messaging import Middleware, metrics
from millstream.observe.metrics import EVERY_S, MAX_SERIES, MAX_STREAMS, Exposition, StreamSurveyor, label
from millstream.observe.service_http import LOOPBACK, LoopServer, service_app
from millstream.observe.service_metrics import ServiceMetrics

PATIENCE_S = 2.0
"""For the broker's answer to a ping: a probe does not wait for longer."""
MAX_FAILURES = 100


class Readable(Protocol):
    """A subscriber, a router, a publisher, a member; or whatever else says whether it is ready."""

    @property
    def ready(self) -> bool: ...


Check = Callable[[], bool | Awaitable[bool]]
"""A condition of the service's own. Raising means no."""
Watched = Readable | Broker | asyncio.Future[Any] | Check


class HealthStatus(NamedTuple):
    """One thing. ``parts`` names what of it is not ready, where it has parts; ``error`` is a class's name."""

    name: str
    ready: bool
    failed: bool = False
    error: str | None = None
    parts: Sequence[str] = ()

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "ready": self.ready}
        if self.failed:
            found["failed"] = True
        if self.error is not None:
            found["error"] = self.error
        if self.parts:
            found["not_ready"] = list(self.parts)
        return found


def is_readable(thing: object) -> TypeGuard[Readable]:
    """Looked up without asking: some can only be asked on a running loop."""
    return inspect.getattr_static(thing, "ready", None) is not None


def check_watched(thing: object) -> Watched:
    if isinstance(thing, (Broker, asyncio.Future)) or is_readable(thing) or callable(thing):
        return thing
    raise InvalidArgument(
        "watch", thing, "a Subscriber, Router, Publisher, AssignmentClient, Broker, task, or a function that says yes"
    )


def name_of(thing: object) -> str:
    """What people call it: ``router``, ``subscriber of billing``. Never an id that is another one after a restart:
    the name becomes a label."""
    if isinstance(thing, asyncio.Task):
        return label(f"task {thing.get_name()}")
    if inspect.isroutine(thing):
        return label(thing.__name__)
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(thing).__name__).lower()
    group = getattr(getattr(thing, "settings", None), "group", None)
    return label(f"{kind} of {group}" if group else kind)


async def health_of(name: str, thing: Watched) -> HealthStatus:
    """Asks the thing, on its own loop. Never raises, and never waits for longer than PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _ask(name, thing)
    except TimeoutError:
        return HealthStatus(name, False, error="TimeoutError")
    except Exception as error:
        return HealthStatus(name, False, error=type(error).__name__)


async def _ask(name: str, thing: Watched) -> HealthStatus:
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
    """An observer that remembers which subscriptions have ended by an error and were not begun again."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str, str], str] = {}

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.note(name, facts)

    def note(self, name: str, facts: Mapping[str, Any]) -> None:
        """The same for facts that are a mapping already."""
        if name == "messaging.subscription_failed":
            if len(self._failed) < MAX_FAILURES:
                self._failed[_subscription(facts)] = str(facts.get("error_type", MillstreamError.__name__))
        elif name == "messaging.subscribed":
            self._failed.pop(_subscription(facts), None)

    def statuses(self) -> list[HealthStatus]:
        return [
            HealthStatus(label(f"subscription {topic} of group {group}"), False, failed=True, error=error)
            for (topic, group, _), error in self._failed.items()
        ]


def _subscription(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(facts.get("topic")), str(facts.get("group")), str(facts.get("consumer"))


PORT = 9100


class ServiceMonitor:
    """Metrics, health and readiness of one service, over HTTP where a port is given.

        monitor = ServiceMonitor(port=9100)
        async with open_broker(url, observer=monitor) as broker:
            ...
            async with monitor.watch(router, broker):
                await router.run()

    It is an observer. ``port=None``: no HTTP; mount ``monitor.app`` in an application of your own. Off loopback a
    ``token`` is required. ``per_consumer``: series for each consumer and member too, of which there may be many.
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
        self._surveyors: list[StreamSurveyor] = []
        self._statuses = _HealthMetrics()
        self.registry.register(self._statuses)
        self.app: Starlette = service_app(metrics=self.exposition, health=self.health, ready=self.ready, token=token)
        """The ASGI application, to be mounted elsewhere. It must run on the loop of what is watched."""
        self._server = None if port is None else LoopServer(self.app, host=host, port=port, token=token)

    @property
    def registry(self) -> CollectorRegistry:
        """For metrics of your own beside these."""
        return self._exposition.registry

    @property
    def port(self) -> int | None:
        """Where it listens; with ``port=0`` known after the start."""
        return None if self._server is None else self._server.port

    # --- what it is told, and what it looks at ----------------------------------------------------------------------

    def __call__(self, name: str, /, **facts: Any) -> None:
        self._metrics.count(name, facts)
        self._failures.note(name, facts)

    def timings(self) -> Middleware:
        """For ``router.use``: how long each handler takes, and how it ends. It costs each message some microseconds,
        so it is there for those who ask."""
        return metrics(self)

    def watch(self, *things: Watched, **named: Watched) -> Self:
        """Subscribers, routers, publishers, members, brokers, tasks, and functions of your own that say yes or no.

        All of them must be ready for the service to be ready. A broker is asked with a ping.
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

    def survey(self, broker: Broker, *streams: str, max_streams: int = MAX_STREAMS, every_s: float = EVERY_S) -> Self:
        """Adds length, lag and pending of these streams (or globs), asked when a scraper comes, at most every
        ``every_s``. Once a service: two surveys of one registry would give the same series twice."""
        if self._surveyors:
            raise InvalidArgument("survey", streams, "all streams in one call: the series exist once")
        surveyor = StreamSurveyor(
            broker, streams, per_consumer=self._per_consumer, max_streams=max_streams, every_s=every_s
        )
        self._surveyors.append(surveyor)
        self.registry.register(surveyor)
        return self

    # --- what it shows ----------------------------------------------------------------------------------------------

    async def statuses(self) -> list[HealthStatus]:
        """Everything that is watched, and what has failed since it began."""
        watched = await asyncio.gather(*(health_of(name, thing) for name, thing in self._watched.items()))
        return [*watched, *self._failures.statuses()]

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Ill while a subscription or a task has ended by an error, and was not begun again."""
        failed = [one.shown() for one in await self.statuses() if one.failed]
        return not failed, {"failed": failed}

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready while everything is; nothing watched, nothing to wait for."""
        statuses = await self.statuses()
        waiting = [one.shown() for one in statuses if not one.ready]
        return not waiting, {"not_ready": waiting, "watched": [one.name for one in statuses]}

    async def exposition(self) -> tuple[bytes, str]:
        """All metrics, in Prometheus's text format, and its content type."""
        for surveyor in self._surveyors:
            await surveyor.refresh()
        self._statuses.look(await self.statuses(), self._watched)
        return self._exposition.text(), self._exposition.content_type

    # --- its life ---------------------------------------------------------------------------------------------------

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
    """What was found on looking at the watched, for the exposition that follows at once."""

    def __init__(self) -> None:
        self._families: list[GaugeMetricFamily] = []

    def look(self, statuses: list[HealthStatus], watched: dict[str, Watched]) -> None:
        ready = GaugeMetricFamily("millstream_ready", "1: what is watched is ready.", labels=["what"])
        for one in statuses:
            ready.add_metric([label(one.name)], int(one.ready))
        self._families = [
            ready,
            GaugeMetricFamily(
                "millstream_failed",
                "Watched things and subscriptions that have failed.",
                value=sum(one.failed for one in statuses),
            ),
            GaugeMetricFamily(
                "millstream_publisher_buffered_messages",
                "Messages taken and not stored yet.",
                value=sum(getattr(one, "buffered", 0) for one in watched.values()),
            ),
            GaugeMetricFamily(
                "millstream_assignment_owned_streams", "Streams that watched members own.", value=_owned(watched)
            ),
        ]

    def collect(self) -> list[GaugeMetricFamily]:
        return self._families


def _owned(watched: dict[str, Watched]) -> int:
    members = [getattr(one, "client", one) for one in watched.values()]
    return sum(len(getattr(member, "owned", ())) for member in members)
