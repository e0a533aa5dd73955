"""The router: runs the handlers of many topics concurrently. A failing handler never stops the router.

Handlers are registered before the start. Each has a subscriber of its own, which decides the outcome of its messages.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack, overload

from millstream.errors import BrokerClosed, InvalidArgument, MillstreamError
from millstream.messaging.handler import (
    BatchDecorator,
    HandlerDecorator,
    HandlerRefused,
    Middleware,
    callable_place,
    current_handler,
)
from millstream.messaging.housekeeping import Housekeeper
from millstream.messaging.marshaler import Marshaler
from millstream.messaging.partitions import OutputTopic
from millstream.messaging.route import (
    PriorityGate,
    Route,
    TopicReader,
    make_gate,
    make_route,
    make_subscriber,
    refuse_shared_groups,
)
from millstream.messaging.settings import SubscriberOptions
from millstream.messaging.supervision import is_open, is_worth_retrying, keep_running, run_until_signalled
from millstream.model import Backoff, EntryId, milliseconds

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol

log = logging.getLogger("millstream.router")
POLL_S = 0.005
CLOSE_TIMEOUT_MS = 30_000
RESTART = Backoff(initial_ms=200, max_ms=30_000, jitter=0.5)


class AlreadyRunning(MillstreamError):
    """A router can run only once. Create a new one to run again."""

    def __init__(self) -> None:
        super().__init__("this router runs already, or has run. Create a new one.")


class HasRoutes(Protocol):
    """What a router can include: another router, a command bus, an event bus."""

    def routes(self) -> Sequence[Route]: ...


class RouterState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


def _given(group_start: str | EntryId | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Marks an option that was not given, so that it does not override the router's."""
    return {**options} if group_start is None else {**options, "group_start": group_start}


class Router:
    """``router = Router(broker)``, ``@router.on("orders", group="billing", group_start="0")``, ``await router.run()``.

    Options given here (``codec``, ``max_in_flight``, ``ack_policy``, ...) apply to every handler that does not override
    them; they have the names of the subscriber's options. A router without a broker can be included in another one.
    """

    def __init__(
        self,
        broker: BrokerProtocol | None = None,
        *,
        close_timeout_ms: int | None = None,
        group_start: str | EntryId | None = None,
        marshaler: Marshaler | None = None,
        **options: Unpack[SubscriberOptions],
    ) -> None:
        self._broker = broker
        self._close_timeout_ms = milliseconds("close_timeout", close_timeout_ms, CLOSE_TIMEOUT_MS)
        self._options: Mapping[str, Any] = _given(group_start, options)
        self._marshaler = marshaler
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}
        """Replacements of dependencies in all handlers of the router, for tests."""
        self._middleware: list[Middleware] = []
        self._own: list[Route] = []
        self._places: dict[tuple[str, str | None], Route] = {}
        self._included: list[HasRoutes] = []
        self._state = RouterState.NEW
        self._stop = asyncio.Event()
        self._closed = asyncio.Event()
        self._subscribers: list[tuple[Route, TopicReader]] = []

    # --- registration -----------------------------------------------------------------------------------------------

    @overload
    def on(
        self,
        topic: str | Mapping[str, int],
        *,
        group: str | None = None,
        group_start: str | EntryId | None = None,
        start: str | EntryId | None = None,
        publish_to: OutputTopic | None = None,
        partitions: int | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **options: Unpack[SubscriberOptions],
    ) -> HandlerDecorator: ...

    @overload
    def on(
        self,
        topic: str | Mapping[str, int],
        *,
        batch: int,
        linger_ms: int = 50,
        group: str | None = None,
        group_start: str | EntryId | None = None,
        start: str | EntryId | None = None,
        publish_to: OutputTopic | None = None,
        partitions: int | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **options: Unpack[SubscriberOptions],
    ) -> BatchDecorator: ...

    def on(
        self,
        topic: str | Mapping[str, int],
        *,
        batch: int | None = None,
        linger_ms: int = 50,
        group: str | None = None,
        group_start: str | EntryId | None = None,
        start: str | EntryId | None = None,
        publish_to: OutputTopic | None = None,
        partitions: int | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **options: Unpack[SubscriberOptions],
    ) -> HandlerDecorator | BatchDecorator:
        """Registers the decorated function for ``topic``. It takes the message, or its body (a pydantic model, a
        dataclass, a TypedDict: read by the router's ``marshaler``, from JSON by default), and its dependencies
        (``Depends``). Its return value is published to ``publish_to``, together with the acknowledgement. Without a
        group every instance receives every message after ``start`` (None: new messages only).

        ``partitions``: the number of streams into which the topic is split by key, as ``Publisher(partitions=...)``
        writes them. Each has one owner among all instances at a time, so messages of one key are handled in order.
        ``batch``: the function takes a list of up to ``batch`` messages (or bodies), and waits for them for at most
        ``linger_ms``; each message gets its own outcome. ``topic`` can be several topics with weights, such as
        ``{"urgent": 10, "bulk": 1}``: they share ``max_in_flight``, and handler starts are divided by weight.

        Raises HandlerRefused, which names the function, if the function or an option is invalid.
        """

        def register(function: Any) -> Any:
            gate, route_options = None, options
            if isinstance(topic, Mapping):
                gate = make_gate(callable_place(function), topic, {**self._options, **options})
                # Twice as many in flight as may run, so that each topic always has a message that can start.
                route_options = {**options, "max_in_flight": 2 * gate.limit}
            for topic_name in topic if isinstance(topic, Mapping) else [topic]:
                self.add(
                    *(function, topic_name),
                    group=group,
                    group_start=group_start,
                    start=start,
                    publish_to=publish_to,
                    partitions=partitions,
                    batch=batch,
                    linger_ms=linger_ms,
                    gate=gate,
                    name=name,
                    middleware=middleware,
                    **route_options,
                )
            return function

        return register

    def add(
        self,
        function: Callable[..., Any],
        topic: str,
        *,
        group: str | None = None,
        group_start: str | EntryId | None = None,
        start: str | EntryId | None = None,
        publish_to: OutputTopic | None = None,
        partitions: int | None = None,
        batch: int | None = None,
        linger_ms: int = 50,
        gate: PriorityGate | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **options: Unpack[SubscriberOptions],
    ) -> Route:
        """Registers ``function`` for one topic without a decorator; options as of ``on``. ``gate``: the priority queue
        that topics with weights share."""
        self._refuse_changes()
        if group is None and group_start is not None:
            raise HandlerRefused(
                callable_place(function), "group_start without a group. Name the group, or pass start."
            )
        route = make_route(
            *(function, topic),
            group=group,
            start=start,
            publish_to=publish_to,
            partitions=partitions,
            batch=batch,
            linger_ms=linger_ms,
            gate=gate,
            name=name,
            middleware=middleware,
            options={**self._options, **_given(group_start, options)},
            marshaler=self._marshaler,
            overrides=self.dependency_overrides,
        )
        place = (route.topic, route.group)
        refuse_shared_groups([self._places.get(place, route), route])
        self._places[place] = route
        self._own.append(route)
        return route

    def use(self, *middleware: Middleware) -> None:
        """Wraps all handlers of this router, also included ones and those that are registered later."""
        self._refuse_changes()
        for function in middleware:
            if not callable(function):
                raise InvalidArgument("middleware", function, "the result of a middleware function, such as retry()")
        self._middleware += middleware

    def include(self, *others: HasRoutes) -> None:
        """Adds the handlers of other routers, of a command bus, or of an event bus."""
        self._refuse_changes()
        for other in others:
            if other is self:
                raise InvalidArgument("router", other, "another router than itself")
            if not callable(getattr(other, "routes", None)):
                raise InvalidArgument("router", other, "a Router, a CommandBus or an EventBus")
        refuse_shared_groups([*self.routes(), *(route for other in others for route in other.routes())])
        self._included += others

    def routes(self) -> list[Route]:
        """The routes of its own and of included handlers, wrapped in its middleware."""
        included = [route for other in self._included for route in other.routes()]
        return [route.inside(self._middleware, self._options) for route in (*self._own, *included)]

    def _refuse_changes(self) -> None:
        if self._state is not RouterState.NEW:
            raise AlreadyRunning

    # --- run and close ------------------------------------------------------------------------------------------------

    @property
    def broker(self) -> BrokerProtocol | None:
        """The broker of the router; None for a router that is included in another one."""
        return self._broker

    @property
    def ready(self) -> bool:
        """True while the topics of all handlers are read."""
        return self._state is RouterState.RUNNING and all(subscriber.ready for _, subscriber in self._subscribers)

    @property
    def readiness(self) -> dict[str, bool]:
        """Each handler with its topic, and whether the topic is read; empty while the router does not run."""
        if self._state is not RouterState.RUNNING:
            return {}
        return {f"{route.name} on {route.topic}": subscriber.ready for route, subscriber in self._subscribers}

    async def run(self, *, handle_signals: bool = True) -> None:
        """Runs until ``close`` is called or SIGINT or SIGTERM is received; then waits for running handlers, up to
        ``close_timeout_ms``. A second signal does not wait. The previous signal handlers are restored at the end.

        Raises AlreadyRunning at a second call, and permanent errors that occur before the first read.
        """
        if handle_signals and threading.current_thread() is threading.main_thread():
            await run_until_signalled(self._run(), self.close)
        else:
            await self._run()

    async def _run(self) -> None:
        running = self._start()
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            # The first cancellation closes the router within its time limit; a second one does not wait.
            patience_ms = 0 if self._stop.is_set() else self._close_timeout_ms
            self._stop.set()
            await asyncio.gather(*(subscriber.close(patience_ms) for _, subscriber in self._subscribers))
            await asyncio.wait([running])
            raise

    async def __aenter__(self) -> Self:
        """Runs in the background until the end of the block. The block begins when all topics are read."""
        running = self._start()
        try:
            await self._until_ready(running)
        except asyncio.CancelledError:
            await self.close()  # the block does not begin, so nothing else would close it
            raise
        if running.done():
            await running
        return self

    async def _until_ready(self, running: asyncio.Task[None]) -> None:
        pause_s = POLL_S
        while not running.done():
            began = time.perf_counter()
            if self.ready:
                break
            # Checking ten thousand topics takes a while: the pause is ten times as long, so that they can start.
            pause_s = max(POLL_S, 10 * (time.perf_counter() - began))
            await asyncio.wait([running], timeout=pause_s)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops reading, waits for running handlers up to ``close_timeout_ms``, and returns the other messages to
        their groups. Idempotent. Before ``run`` it does nothing. If a handler of this router calls it, it returns
        before the router is closed, because it cannot wait for that handler."""
        if self._state is RouterState.NEW:
            return
        self._stop.set()
        if current_handler().owner is not self:
            await self._closed.wait()

    def _start(self) -> asyncio.Task[None]:
        self._refuse_changes()
        if self._broker is None:
            raise InvalidArgument("broker", None, "Router(broker), or include this router in one that has a broker")
        routes = self.routes()
        if not routes:
            raise InvalidArgument("router", self, "a router with at least one handler: register one with router.on")
        refuse_shared_groups(routes)
        _warn_of_broadcasts(routes)
        housekeeper = Housekeeper(self._broker, routes)
        self._subscribers = [(route, make_subscriber(self._broker, route)) for route in routes]
        self._state = RouterState.RUNNING
        return asyncio.create_task(self._supervise(housekeeper), name="millstream router")

    async def _supervise(self, housekeeper: Housekeeper) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        housekeeping = asyncio.create_task(
            keep_running(housekeeper.run, "housekeeping", self._emit, repeats=is_open), name="millstream housekeeping"
        )
        serving = [
            asyncio.create_task(self._serve(route, subscriber), name=f"millstream route {route.name}")
            for route, subscriber in self._subscribers
        ]
        try:
            # A route ends by itself only if it can never start, which is an error of the whole program.
            await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            stopping.cancel()
            housekeeping.cancel()
            timeout_ms = self._close_timeout_ms
            closing = [subscriber.close(timeout_ms) for _, subscriber in self._subscribers]
            results = await asyncio.gather(*closing, *serving, return_exceptions=True)
            await asyncio.gather(housekeeping, return_exceptions=True)  # cancelled, or the broker is closed
            self._state = RouterState.CLOSED
            self._closed.set()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _serve(self, route: Route, subscriber: TopicReader) -> None:
        """Consumes until the router stops. Reports an error, and resumes after a pause."""
        handler = route.wrapped(subscriber.settings.consumer, self)
        failures = 0
        while not self._stop.is_set():
            try:
                await subscriber.consume(route.topic, handler, publish_to=route.publish_to, start=route.start)
            except Exception as error:
                # Before the first read, a permanent error ends the program; later the operator may correct its cause.
                if isinstance(error, BrokerClosed) or not (subscriber.has_read or is_worth_retrying(error)):
                    raise
                failures += 1
                log.error("handler %s stopped reading %r: %s", route.name, route.topic, error)
                self._emit("messaging.route_failed", handler=route.name, topic=route.topic, error=str(error))
                chance = random.random()  # noqa: S311 (jitter, not a secret)
                await self._pause(RESTART.delay_ms(failures, chance) / 1000)

    async def _pause(self, duration: float) -> None:
        try:
            async with asyncio.timeout(duration):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _emit(self, name: str, **details: Any) -> None:
        assert self._broker is not None
        self._broker.context.observer(name, **details)


def _warn_of_broadcasts(routes: Sequence[Route]) -> None:
    """Logs handlers without a group if the router has a group_start: a forgotten ``group`` makes a broadcast."""
    broadcasts = [route for route in routes if route.group is None and "group_start" in route.options]
    places = [f"{route.name} on {route.topic!r} ({route.place})" for route in broadcasts if route.start is None]
    if places:
        log.warning(
            "the router has group_start, but %d of its handlers have no group: every process receives every message, "
            "and nothing is redelivered. Name a group, or pass start where a broadcast is wanted: %s",
            *(len(places), ", ".join(places[:10])),
        )
