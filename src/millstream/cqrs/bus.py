"""The command bus (one handler per command class) and the event bus (any number of handlers per event class).

Each bus registers and runs handlers, and publishes commands or events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from millstream.cqrs.handlers import (
    Check,
    Handlers,
    Registered,
    check_one_handler_per_command,
    check_one_handler_per_group,
)
from millstream.errors import InvalidArgument
from millstream.messaging import (
    CannotUnmarshal,
    HandlerRefused,
    Marshaler,
    Message,
    Publisher,
    PydanticMarshaler,
    Router,
)
from millstream.messaging.calls import call
from millstream.messaging.marshaler import BODY_NAME
from millstream.messaging.message import KEY
from millstream.messaging.middleware import correlated
from millstream.messaging.route import Route, make_subscriber, refuse_shared_groups
from millstream.messaging.settings import SubscriberOptions, check_topic
from millstream.model import milliseconds

if TYPE_CHECKING:
    from millstream.broker import BrokerProtocol


TopicOf = Callable[[str], str]
"""Maps the name of a class to its topic."""

COMMAND_GROUP = "handlers"
"""The group of every command topic, which all instances of the handler share."""


def command_topic(name: str) -> str:
    """The topic that carries a command class: ``command.<Name>``."""
    return f"command.{name}"


def event_topic(name: str) -> str:
    """The topic that carries an event class: ``event.<Name>``."""
    return f"event.{name}"


class Bus(Handlers, ABC):
    """The common part of CommandBus and EventBus.

    ``options`` are options of the subscriber; a handler's own options override them. A handler's return value is
    ignored: use ``send`` or ``publish`` for further messages.
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
        self._check_handlers = check
        self._broker = broker
        self._topic = topic
        self._marshaler = marshaler or PydanticMarshaler()
        self._publisher = publisher
        self._owns_publisher = publisher is None
        self._close_timeout_ms = close_timeout_ms
        self._options = options
        self._router: Router | None = None
        self.dependency_overrides: dict[Callable[..., Any], Callable[..., Any]] = {}
        """Replacements of dependencies, for tests."""

    @property
    def broker(self) -> BrokerProtocol:
        """The broker of the bus."""
        return self._broker

    @property
    def ready(self) -> bool:
        """True while every handler's topic is being read."""
        return self._router is not None and self._router.ready

    @property
    def readiness(self) -> dict[str, bool]:
        """Each handler and its topic, and whether that is being read; empty while the bus does not run."""
        return {} if self._router is None else self._router.readiness

    def topic_of(self, kind: type) -> str:
        """The topic of commands or events of this class. Raises InvalidArgument if the name is empty."""
        return check_topic(self._topic(self._marshaler.name(kind)))

    def routes(self) -> list[Route]:
        """The routes of all handlers, for ``router.include(bus)``."""
        return [self._route(registered) for registered in self.registered()]

    async def run(self, *, handle_signals: bool = True) -> None:
        """Runs the handlers until ``close`` is called or a signal is received. See ``Router.run``."""
        await self._new_router().run(handle_signals=handle_signals)

    async def __aenter__(self) -> Self:
        """Runs the handlers in the background until the end of the block. Without handlers the bus only sends."""
        if self.registered():
            await self._new_router().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits for messages in flight and for pending publishes, then closes. Idempotent."""
        if self._router is not None:
            await self._router.close()
        if self._owns_publisher and self._publisher is not None:
            await self._publisher.close()
            self._publisher = None

    @abstractmethod
    def _handle_other_type(self, expected: str, name: str) -> None:
        """Called for a message whose metadata names another type than the handler's."""

    @abstractmethod
    def _group(self, registered: Registered) -> tuple[str, str]:
        """The handler's group, and its start position if the group does not exist yet."""

    def _check_routes(self, registered: Sequence[Registered]) -> None:
        self._check_handlers(registered)
        routes = [self._route(registration) for registration in registered]
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

        expected = self._marshaler.name(body)

        async def handle(message: Message) -> None:
            name = message.metadata.get(BODY_NAME)
            # Only if the topic is shared with the named type. Otherwise the field may have another meaning, for example
            # in an entry added by a plain XADD.
            if name is not None and name != expected and self._topic(name) == topic:
                self._handle_other_type(expected, name)
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

    async def _publish_body(
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

    All instances of a service share the commands. The group starts at the beginning of the stream, so that commands
    sent before the first start of a handler are handled too.
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
        **options: Unpack[SubscriberOptions],
    ) -> None:
        super().__init__(
            broker,
            check_one_handler_per_command,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout_ms=milliseconds("close_timeout", close_timeout_ms, 30_000),
            options=options,
        )
        self._group_name = group
        self._group_start = group_start

    async def send(
        self, command: object, *, metadata: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> str:
        """Sends a command: stored when this returns, handled later. Returns the message's uuid.

        Commands with the same ``key`` stay in order. ``options`` are those of the publisher, such as ``delay_ms``.
        """
        return await self._publish_body(command, metadata, key, options)

    def _handle_other_type(self, expected: str, name: str) -> None:
        # Not acknowledged: no other group reads the topic of a command, so the command would be lost.
        raise CannotUnmarshal(expected, f"its metadata names the type {name}")

    def _group(self, registered: Registered) -> tuple[str, str]:
        return self._group_name, self._group_start


class EventBus(Bus):
    """``@bus.handler async def welcome(event: UserCreated): ...`` and ``await bus.publish(UserCreated(...))``.

    Each handler has its own group, ``<service>.<handler's name>``, which receives every event once for all instances.
    Renaming a handler creates a new group; pass ``name=`` to keep the old one.

    ``group_start`` has no default: with "$" a new handler starts with new events, with "0" at the beginning of the
    stream.
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
        **options: Unpack[SubscriberOptions],
    ) -> None:
        if not service:
            raise InvalidArgument("service", service, "the service's name: handlers of two services are two groups")
        super().__init__(
            broker,
            check_one_handler_per_group,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout_ms=milliseconds("close_timeout", close_timeout_ms, 30_000),
            options=options,
        )
        self._service = service
        self._group_start = group_start

    async def publish(
        self, event: object, *, metadata: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> str:
        """Publishes an event: stored when this returns. Returns the message's uuid. ``options``: the publisher's."""
        return await self._publish_body(event, metadata, key, options)

    def _handle_other_type(self, expected: str, name: str) -> None:
        """Ignores the event: on a topic shared by several event types, each handler handles only its own."""

    def _group(self, registered: Registered) -> tuple[str, str]:
        return f"{self._service}.{registered.name}", self._group_start
