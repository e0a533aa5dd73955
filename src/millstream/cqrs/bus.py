"""The buses: commands, each done by the one handler that there is for it; events, heard by all handlers that care.

Both are handlers that can be run, and a publisher for what is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from millstream.cqrs.handlers import Check, Handlers, Registered, one_group_each, one_handler_each
from millstream.errors import InvalidArgument
from millstream.messaging import (
    BODY_NAME,
    KEY,
    CannotUnmarshal,
    HandlerRefused,
    Marshaler,
    Message,
    Publisher,
    PydanticMarshaler,
    Route,
    Router,
    SubscriberOptions,
    call,
    check_topic,
    correlated,
    make_subscriber,
    refuse_shared_groups,
)
from millstream.model import Seconds, milliseconds

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol


TopicOf = Callable[[str], str]
"""From a class's name to its topic."""

COMMAND_GROUP = "handlers"
"""The one group of every command's topic: all instances of the one handler share the work."""


def command_topic(name: str) -> str:
    return f"command.{name}"


def event_topic(name: str) -> str:
    return f"event.{name}"


class Bus(Handlers, ABC):
    """Not used by itself: see CommandBus and EventBus.

    ``options`` are a subscriber's, and hold for every handler that has none of its own. What a handler returns is not
    used: to put something out, send or publish it.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        check: Check,
        *,
        topic: TopicOf,
        marshaler: Marshaler | None,
        publisher: Publisher | None,
        close_timeout_ms: int,
        options: SubscriberOptions,
    ) -> None:
        super().__init__(self._check_routes)
        self._rule = check
        self._broker = broker
        self._topic = topic
        self._marshaler = marshaler or PydanticMarshaler()
        self._publisher = publisher
        self._owns_publisher = publisher is None
        self._close_timeout_ms = close_timeout_ms
        self._options = options
        self._router: Router | None = None
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}
        """Dependencies and what stands in for them, for tests."""

    @property
    def broker(self) -> BrokerProtocol:
        """The one that it runs on."""
        return self._broker

    def topic_of(self, kind: type) -> str:
        """Where commands or events of this class travel. Raises InvalidArgument where that would be an empty name."""
        return check_topic(self._topic(self._marshaler.name(kind)))

    def routes(self) -> list[Route]:
        """What a Router runs: ``router.include(bus)``."""
        return [self._route(registered) for registered in self.registered()]

    async def run(self, *, handle_signals: bool = True) -> None:
        """Handles until ``close`` is called or a signal comes. See ``Router.run``."""
        await self._new_router().run(handle_signals=handle_signals)

    async def __aenter__(self) -> Self:
        """Handles in the background, as long as the block lasts; without handlers it only sends."""
        if self.registered():
            await self._new_router().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent. Waits for what is in flight, and for what was sent."""
        if self._router is not None:
            await self._router.close()
        if self._owns_publisher and self._publisher is not None:
            await self._publisher.close()
            self._publisher = None

    @abstractmethod
    def _pass_over(self, wanted: str, name: str) -> None:
        """A message says itself that it is of another type than the handler's."""

    @abstractmethod
    def _group(self, registered: Registered) -> tuple[str, str]:
        """The handler's group, and where it begins if it does not exist yet."""

    def _check_routes(self, registered: Sequence[Registered]) -> None:
        self._rule(registered)
        routes = [self._route(each) for each in registered]
        refuse_shared_groups(routes)
        for route in routes:
            make_subscriber(None, route)

    def _new_router(self) -> Router:
        if self._router is None:
            router = Router(self._broker, close_timeout_ms=self._close_timeout_ms)
            router.include(self)
            self._router = router
        return self._router

    def _route(self, registered: Registered) -> Route:
        group, start = self._group(registered)
        options: dict[str, Any] = {"group_start": start, **self._options, **registered.options}
        partitions = options.pop("partitions", None)
        plan, body, unmarshal = registered.plan, registered.body, self._marshaler.unmarshal
        try:
            topic = self.topic_of(body)
        except InvalidArgument as error:
            raise HandlerRefused(registered.place, str(error)) from error

        wanted = self._marshaler.name(body)

        async def handle(message: Message) -> None:
            name = message.metadata.get(BODY_NAME)
            # Another type, where the topic is that type's too. On a topic of one type, ``name`` may be anything: a
            # plain XADD with a field of that name, for example.
            if name is not None and name != wanted and self._topic(name) == topic:
                self._pass_over(wanted, name)
                return
            await call(plan, unmarshal(message, body), message, self.dependency_overrides)

        return Route(
            name=registered.name,
            topic=topic,
            group=group,
            handler=handle,
            place=registered.place,
            partitions=partitions,
            middleware=registered.middleware,
            options=options,
        )

    async def _put(
        self, body: object, metadata: dict[str, str] | None, key: str | None, options: dict[str, Any]
    ) -> str:
        message = correlated(self._marshaler.marshal(body))
        if metadata and BODY_NAME in metadata and BODY_NAME in message.metadata:
            raise InvalidArgument("metadata", metadata, f"another key than {BODY_NAME!r}, which names the class")
        message.metadata.update(metadata or {})
        if key is not None:
            message.metadata[KEY] = key
        if self._publisher is None:
            split = {route.topic: route.partitions for route in self.routes() if route.partitions is not None}
            self._publisher = Publisher(self._broker, codec=self._options.get("codec", "flat"), partitions=split)
        await self._publisher.publish(self.topic_of(type(body)), message, **options)
        return message.uuid


class CommandBus(Bus):
    """``@bus.handler async def create(command: CreateUser): ...`` and ``await bus.send(CreateUser(...))``.

    All instances of a service share the work of a command. Its group begins at the beginning: a command that was sent
    before the first handler ever ran is still to be done.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        topic: TopicOf = command_topic,
        group: str = COMMAND_GROUP,
        group_start: str = "0",
        marshaler: Marshaler | None = None,
        publisher: Publisher | None = None,
        close_timeout_ms: int | None = None,
        close_timeout: Seconds | None = None,
        **options: Unpack[SubscriberOptions],
    ) -> None:
        super().__init__(
            broker,
            one_handler_each,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout_ms=milliseconds("close_timeout", close_timeout_ms, 30_000, close_timeout),
            options=options,
        )
        self._group_name = group
        self._group_start = group_start

    async def send(
        self, command: object, *, metadata: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> str:
        """Stored when this returns; handled whenever its handler comes to it. Returns the message's uuid.

        ``key`` is what must stay in order; ``options`` are the publisher's, such as ``delay_ms``.
        """
        return await self._put(command, metadata, key, options)

    def _pass_over(self, wanted: str, name: str) -> None:
        # Acknowledged, it would never be done: a command's topic has no other group that could.
        raise CannotUnmarshal(wanted, f"it says that it is a {name}")

    def _group(self, registered: Registered) -> tuple[str, str]:
        return self._group_name, self._group_start


class EventBus(Bus):
    """``@bus.handler async def welcome(event: UserCreated): ...`` and ``await bus.publish(UserCreated(...))``.

    Every handler has a group of its own, ``<service>.<handler's name>``: it gets every event once, however many
    instances run. Renaming a handler makes a new group; pass ``name=`` to keep the old one.

    ``group_start`` has no default: "$" lets a new handler begin with what happens from now on, "0" with all that the
    stream still holds.
    """

    def __init__(
        self,
        broker: BrokerProtocol,
        *,
        service: str,
        group_start: str,
        topic: TopicOf = event_topic,
        marshaler: Marshaler | None = None,
        publisher: Publisher | None = None,
        close_timeout_ms: int | None = None,
        close_timeout: Seconds | None = None,
        **options: Unpack[SubscriberOptions],
    ) -> None:
        if not service:
            raise InvalidArgument("service", service, "the service's name: handlers of two services are two groups")
        super().__init__(
            broker,
            one_group_each,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout_ms=milliseconds("close_timeout", close_timeout_ms, 30_000, close_timeout),
            options=options,
        )
        self._service = service
        self._group_start = group_start

    async def publish(
        self, event: object, *, metadata: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> str:
        """Stored when this returns. Returns the message's uuid. ``options`` are the publisher's."""
        return await self._put(event, metadata, key, options)

    def _pass_over(self, wanted: str, name: str) -> None:
        """On a topic that several types of event share, each handler has its own group, and hears of its own type."""

    def _group(self, registered: Registered) -> tuple[str, str]:
        return f"{self._service}.{registered.name}", self._group_start
