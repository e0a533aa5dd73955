"""Commands: something is to be done, by the one handler that there is for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.cqrs.bus import Bus
from millstream.cqrs.handlers import Registered, one_handler_each
from millstream.cqrs.marshaler import Marshaler
from millstream.cqrs.topics import COMMAND_GROUP, TopicOf, command_topic
from millstream.messaging.publisher import Publisher
from millstream.model.units import Seconds

if TYPE_CHECKING:
    from millstream.broker.broker import Broker


class CommandBus(Bus):
    """``@bus.handler async def create(command: CreateUser): ...`` and ``await bus.send(CreateUser(...))``.

    All instances of a service share the work of a command. Its group begins at the beginning: a command that was sent
    before the first handler ever ran is still to be done.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        topic: TopicOf = command_topic,
        group: str = COMMAND_GROUP,
        group_start: str = "0",
        marshaler: Marshaler | None = None,
        publisher: Publisher | None = None,
        close_timeout: Seconds = 30.0,
        **options: Any,
    ) -> None:
        super().__init__(
            broker,
            one_handler_each,
            topic=topic,
            marshaler=marshaler,
            publisher=publisher,
            close_timeout=close_timeout,
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

    def _group(self, registered: Registered) -> tuple[str, str]:
        return self._group_name, self._group_start
