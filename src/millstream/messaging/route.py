"""A route: one topic, one group, one handler and its middleware. It is checked when it is created.

Several topics of one handler may have weights. Each topic is read as usual; a priority queue decides which message
starts next. Topics with waiting messages share the starts by weight, evenly spread: with weights 3 and 1, three
messages of the first start for each one of the second. No topic starves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from millstream.broker.keys import can_have_companions
from millstream.errors import InvalidArgument, MillstreamError, did_you_mean
from millstream.messaging.calls import Overrides, batch_handler, check_batch, topic_handler
from millstream.messaging.consumer import Subscriber
from millstream.messaging.handler import (
    Handler,
    HandlerRefused,
    Middleware,
    Output,
    RunningHandler,
    begin,
    callable_name,
    callable_place,
    end,
    needs_thread,
    wait_for_turn,
)
from millstream.messaging.handler_threads import handler_threads
from millstream.messaging.marshaler import Marshaler, PydanticMarshaler
from millstream.messaging.message import Message
from millstream.messaging.partitions import OutputTopic, check_output_topic, check_partitions
from millstream.messaging.retention import RETENTION_OPTIONS, policy_of
from millstream.messaging.settings import (
    MAX_IN_FLIGHT,
    OPTION_NAMES,
    SubscriberSettings,
    check_group_topic,
    check_topic,
    parse_start,
)
from millstream.model import EntryId
from millstream.wire import to_bytes

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol


class WeightedTurns:
    """Decides which topic starts next. Pure. With each decision every waiting topic is credited with its weight. The
    topic with the most credit is chosen, and pays the sum of these weights."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0)

    def next(self, waiting: Iterable[str]) -> str:
        """Returns one of the waiting topics. Of equals, the one with the higher weight, then the first one named."""
        names = set(waiting)
        candidates = [name for name in self._weights if name in names]
        for name in candidates:
            self._credit[name] += self._weights[name]
        chosen = max(candidates, key=lambda name: (self._credit[name], self._weights[name]))
        self._credit[chosen] -= sum(self._weights[name] for name in candidates)
        for name in self._credit:
            if name not in names:
                self._credit[name] = 0  # a topic without waiting messages keeps no credit
        return chosen


class _GateState:
    """The number of handlers that may start now, and the waiting handlers, of one event loop."""

    def __init__(self, weights: Mapping[str, int], limit: int) -> None:
        self.turns = WeightedTurns(weights)
        self.free = limit
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {name: deque() for name in weights}


class PriorityGate:
    """The priority queue between the topics of one handler: at most ``limit`` handlers run at a time, over all topics.
    A module's route can be used in several event loops, so each loop has its own count and futures."""

    def __init__(self, weights: Mapping[str, int], limit: int) -> None:
        self.limit = limit
        self._weights = dict(weights)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _GateState] = WeakKeyDictionary()

    def _state(self) -> _GateState:
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            state = self._loops[loop] = _GateState(self._weights, self.limit)
        return state

    async def enter(self, topic: str) -> None:
        """Returns when a handler of this topic may start. If it is cancelled, it takes no place."""
        state = self._state()
        if state.free > 0 and not any(state.waiting.values()):
            state.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting[topic].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was chosen in the same moment
            elif turn in state.waiting[topic]:
                state.waiting[topic].remove(turn)
            raise

    def leave(self) -> None:
        state = self._state()
        state.free += 1
        while state.free > 0:
            names = [name for name, turns in state.waiting.items() if turns]
            if not names:
                return
            turn = state.waiting[state.turns.next(names)].popleft()
            if not turn.done():
                state.free -= 1
                turn.set_result(None)


def check_weights(weights: Mapping[str, int]) -> None:
    """Raises InvalidArgument."""
    if not weights:
        raise InvalidArgument("topic", weights, "topics and their weights, such as {'urgent': 10, 'bulk': 1}")
    for name, weight in weights.items():
        if type(weight) is not int or not 1 <= weight <= 1_000_000:
            raise InvalidArgument("topic", {name: weight}, "a weight that is a whole number from 1 to 1,000,000")


class DuplicateRoute(MillstreamError):
    """Two handlers of one topic share a group, so each would receive only some messages. ``places`` names both."""

    places: tuple[str, str]

    def __init__(self, topic: str, group: str, first: str, second: str) -> None:
        super().__init__(
            f"{first} and {second} both read {topic!r} in group {group!r}: each would receive only a part of them. "
            "Give each a group of its own.",
            topic=topic,
            group=group,
            places=(first, second),
        )


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    """The handler's name in observer events, poison-queue metadata and logs."""
    topic: str
    group: str | None
    handler: Handler
    place: str
    publish_to: OutputTopic | None = None
    partitions: int | None = None
    """The number of streams into which the topic is split by key, each with one owner at a time."""
    batch: int | None = None
    """The maximum number of messages that the handler takes in one list."""
    gate: PriorityGate | None = None
    """The priority queue, shared with other topics of the same handler."""
    start: str | EntryId | None = None
    """Without a group: the entry after which reading starts; None: new messages only."""
    middleware: tuple[Middleware, ...] = ()
    """The first is the outermost."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the subscriber, except the group."""

    def wrapped(self, consumer: str | None, owner: object) -> Handler:
        """The handler wrapped in its middleware. During its calls ``current_handler`` is set."""
        handler = _marking(self.handler) if self.middleware else self.handler
        for middleware in reversed(self.middleware):
            handler = middleware(handler)
        waits = bool(self.middleware)
        threaded = needs_thread(self.handler)
        who = RunningHandler(self.name, self.topic, self.group, consumer, owner)

        async def handle(message: Message) -> Output:
            if waits:
                message.begun = False
            token = begin(who)
            try:
                return await handler(message)
            finally:
                end(token)

        handle.__name__ = self.name
        wrapped = _with_thread(handle) if threaded else handle
        return wrapped if self.gate is None else _in_turn(self.gate, self.topic, wrapped)

    def inside(self, middleware: Sequence[Middleware], options: Mapping[str, Any]) -> Route:
        """The same route inside a router: wrapped in its middleware, with its options as defaults."""
        return replace(self, middleware=(*middleware, *self.middleware), options={**options, **self.options})


def _in_turn(gate: PriorityGate, topic: str, handler: Handler) -> Handler:
    async def handle(message: Message) -> Output:
        message.begun = False  # if it is returned to the group while it waits, this delivery is not counted
        await wait_for_turn(message, gate.enter(topic))
        try:
            message.begun = True
            return await handler(message)
        finally:
            gate.leave()

    handle.__name__ = callable_name(handler)
    return handle


def _with_thread(handler: Handler) -> Handler:
    """Takes a thread before the handler and its middleware start, so that no ``timeout`` includes the wait for it."""

    async def handle(message: Message) -> Output:
        message.begun = False  # if it is returned to the group while it waits, this delivery is not counted
        threads = handler_threads()
        await wait_for_turn(message, threads.acquire())
        try:
            message.begun = True
            return await handler(message)
        finally:
            threads.release()

    handle.__name__ = callable_name(handler)
    return handle


def _marking(handler: Handler) -> Handler:
    """Marks the message when it has passed the middleware: from then on its delivery is counted."""

    async def begun(message: Message) -> Output:
        message.begun = True
        return await handler(message)

    return begun


def make_route(
    function: Callable[..., Any],
    topic: str,
    *,
    group: str | None,
    name: str | None = None,
    publish_to: OutputTopic | None = None,
    partitions: int | None = None,
    batch: int | None = None,
    linger_ms: int = 50,
    gate: PriorityGate | None = None,
    start: str | EntryId | None = None,
    middleware: Sequence[Middleware] = (),
    options: Mapping[str, Any] | None = None,
    marshaler: Marshaler | None = None,
    overrides: Overrides | None = None,
) -> Route:
    """Raises HandlerRefused, which names the function, if the function or an option is invalid."""
    marshaler, overrides = marshaler or PydanticMarshaler(), {} if overrides is None else overrides
    place = callable_place(function)
    try:
        if batch is not None:
            check_batch(batch, linger_ms, _max_in_flight(options))
            if group is None:
                raise InvalidArgument("group", None, "a group: without one, messages are handled one after the other")
        if group is None:
            check_topic(topic)
        else:
            check_group_topic(topic)
        if publish_to is not None:
            check_output_topic(publish_to)
        if start is not None:
            _check_start(start, group)
        if partitions is not None and group is None:
            raise InvalidArgument("group", None, "a group: each partition has one owner in the group")
        if partitions is not None and group is not None and not can_have_companions(to_bytes(f"{topic}.{group}")):
            raise InvalidArgument("group", group, "a name without '}': the owners of the partitions are named after it")
    except InvalidArgument as error:
        raise HandlerRefused(place, str(error)) from error
    if batch is None:
        handler = topic_handler(function, marshaler, overrides, publishes=publish_to is not None)
    else:
        handler = batch_handler(function, marshaler, overrides, batch, linger_ms)
    check_middleware(place, middleware)
    route = Route(
        name=name or callable_name(function),
        topic=topic,
        group=group,
        handler=handler,
        place=place,
        publish_to=publish_to,
        partitions=partitions,
        batch=batch,
        gate=gate,
        start=start,
        middleware=tuple(middleware),
        options=options or {},
    )
    make_subscriber(None, route)
    return route


def make_gate(place: str, weights: Mapping[str, int], options: Mapping[str, Any]) -> PriorityGate:
    """The priority queue that topics with weights share. Raises HandlerRefused."""
    try:
        check_weights(weights)
    except InvalidArgument as error:
        raise HandlerRefused(place, str(error)) from error
    return PriorityGate(weights, _max_in_flight(options))


def _max_in_flight(options: Mapping[str, Any] | None) -> int:
    max_in_flight: int = (options or {}).get("max_in_flight", MAX_IN_FLIGHT)
    return max_in_flight


def _check_start(start: str | EntryId, group: str | None) -> None:
    if group is not None:
        raise InvalidArgument("start", start, "group_start, because there is a group")
    parse_start(start, "start")


def check_middleware(place: str, middleware: Sequence[Middleware]) -> None:
    for function in middleware:
        if not callable(function):
            raise HandlerRefused(
                place, f"middleware {function!r} is not callable. Call its factory function first, such as retry()."
            )


class TopicReader(Protocol):
    """The interface of a subscriber that a router uses, for a topic or for the partitions of one."""

    @property
    def settings(self) -> SubscriberSettings: ...

    @property
    def ready(self) -> bool: ...

    @property
    def has_read(self) -> bool: ...

    async def consume(
        self, topic: str, handler: Handler, *, publish_to: OutputTopic | None = None, start: str | EntryId | None = None
    ) -> None: ...

    async def close(self, timeout_ms: int | None = None) -> None: ...


def make_subscriber(broker: BrokerProtocol | None, route: Route) -> TopicReader:
    """The subscriber of a route. It does not connect yet, so it is also used to check the options."""
    options = dict(route.options)
    for name, value in options.items():
        if name == "close_timeout_ms":
            raise HandlerRefused(
                route.place,
                "close_timeout_ms applies to the whole router: pass it to the router, as in "
                f"Router(broker, close_timeout_ms={value!r}), or to the bus.",
            )
        if name not in OPTION_NAMES:
            hint = did_you_mean(name, OPTION_NAMES) or f". The options are {', '.join(sorted(OPTION_NAMES))}."
            raise HandlerRefused(route.place, f"there is no option {name!r}{hint}")
    if route.group is None:
        options.pop("group_start", None)
    for name in RETENTION_OPTIONS:  # the router's housekeeping applies them
        options.pop(name, None)
    try:
        policy = policy_of(route.options)
        if policy is not None and policy.delete_acked and route.group is None:
            raise InvalidArgument(
                "delete_acked", True, "False for a handler without a group: the server does not know what it has read"
            )
        if policy is not None and not can_have_companions(to_bytes(route.topic)):
            raise InvalidArgument("keep", route.topic, "a topic without '}': its policy is stored next to the stream")
        if route.partitions is not None:
            check_partitions(route.partitions)
        if route.partitions is not None and route.group is not None and broker is not None:
            # The only import against the direction of package dependencies: decision 0015.
            from millstream.assignment import PartitionedSubscriber

            return PartitionedSubscriber(
                broker, topic=route.topic, partitions=route.partitions, group=route.group, **options
            )
        return Subscriber(broker, group=route.group, **options)  # type: ignore[arg-type]  # None: only to check
    except InvalidArgument as error:
        raise HandlerRefused(route.place, str(error)) from error


def refuse_shared_groups(routes: Sequence[Route]) -> None:
    first_routes: dict[tuple[str, str], Route] = {}
    for route in routes:
        if route.group is not None:
            first = first_routes.setdefault((route.topic, route.group), route)
            if first is not route:
                raise DuplicateRoute(route.topic, route.group, first.place, route.place)
