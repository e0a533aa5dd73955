"""Events: something has happened, and every handler that cares hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.cqrs.bus import Bus
from millstream.cqrs.handlers import Registered, one_group_each
from millstream.cqrs.marshaler import Marshaler
from millstream.cqrs.topics import TopicOf, event_topic
from millstream.errors import InvalidArgument
from millstream.messaging.publisher import Publisher
from millstream.model.units import Seconds

if TYPE_CHECKING:
    from millstream.broker.broker import Broker


class EventBus(Bus):
    """``@bus.handler async def welcome(event: UserCreated): ...`` and ``await bus.publish(UserCreated(...))``.

    Every handler has a group of its own, ``<service>.<handler's name>``: it gets every event once, however many
    instances run. Renaming a handler makes a new group; pass ``name=`` to keep the old one.

    ``group_start`` has no default: "$" lets a new handler begin with what happens from now on, "0" with all that the
    stream still holds.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        service: str,
        group_start: str,
        topic: TopicOf = event_topic,
        marshaler: Marshaler | None = None,
        publisher: Publisher | None = None,
        close_timeout: Seconds = 30.0,
        **options: Any,
    ) -> None:
        if not service:
            raise InvalidArgument("service", service, "the service's name: handlers of two services are two groups")
        super().__init__(
            broker,
            one_group_each,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout=close_timeout,
            options=options,
        )
        self._service = service
        self._group_start = group_start

    async def publish(
        self, event: object, *, metadata: dict[str, str] | None = None, key: str | None = None, **options: Any
    ) -> str:
        """Stored when this returns. Returns the message's uuid. ``options`` are the publisher's."""
        return await self._put(event, metadata, key, options)

    def _group(self, registered: Registered) -> tuple[str, str]:
        return f"{self._service}.{registered.name}", self._group_start
