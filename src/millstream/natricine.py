"""natricine's names over this package, for programs that move here: change the imports, and they run.

The same positional arguments, defaults and wire format, so that old and new processes share streams and groups while a
fleet is being replaced. What is handled better underneath (claims, retries, dead letters) needs no change; options
beyond natricine's are those of Publisher and Subscriber.
"""

from __future__ import annotations

from typing import Any

from millstream import cqrs
from millstream.broker import open_broker
from millstream.cqrs import Depends, Marshaler, PydanticMarshaler
from millstream.messaging import Message, Publisher, Subscriber

__all__ = [
    "CommandBus",
    "Depends",
    "EventBus",
    "Message",
    "PydanticMarshaler",
    "RedisStreamPublisher",
    "RedisStreamSubscriber",
]

CODEC = "natricine"


class RedisStreamPublisher(Publisher):
    """``RedisStreamPublisher(redis)``: a client of redis-py, or a URL. ``publish(topic, *messages)`` as there."""

    def __init__(self, redis: Any, **options: Any) -> None:
        self._own_broker = open_broker(redis)
        super().__init__(self._own_broker, **{"codec": CODEC, **options})

    async def close(self) -> None:
        """Sends what waits, and closes its connections; the client that it was made from stays open."""
        await super().close()
        await self._own_broker.close()


class RedisStreamSubscriber(Subscriber):
    """``RedisStreamSubscriber(redis, "group", "consumer")``, then ``async for message in subscriber.subscribe(topic)``.

    A group that does not exist yet begins with what the stream holds. ``nack()`` brings a message back, and after
    ``max_deliveries`` it is buried in ``{topic}.dlq``.
    """

    def __init__(
        self,
        redis: Any,
        group_name: str,
        consumer_name: str,
        block_ms: int = 5000,
        count: int = 10,
        **options: Any,
    ) -> None:
        self._own_broker = open_broker(redis)
        self.group_name = group_name
        self.consumer_name = consumer_name
        self.bus_options: dict[str, Any] = {"block_ms": block_ms, "count": count, "codec": CODEC, **options}
        """What a bus reads with that is made over this subscriber."""
        named = {"group": group_name, "consumer": consumer_name, "group_start": "0"}
        super().__init__(self._own_broker, **{**named, **self.bus_options})

    async def close(self, timeout_ms: int | None = None) -> None:
        """Ends all subscriptions, hands back what was not handled, and closes its connections."""
        await super().close(timeout_ms)
        await self._own_broker.close()


def CommandBus(
    publisher: Publisher, subscriber: RedisStreamSubscriber, marshaler: Marshaler | None = None
) -> cqrs.CommandBus:
    """A command bus over a publisher and a subscriber: commands travel by ``command.<Name>``, in the subscriber's
    group."""
    return cqrs.CommandBus(
        subscriber._own_broker,
        publisher=publisher,
        marshaler=marshaler,
        group=subscriber.group_name,
        consumer=subscriber.consumer_name,
        **subscriber.bus_options,
    )


def EventBus(
    publisher: Publisher, subscriber: RedisStreamSubscriber, marshaler: Marshaler | None = None
) -> cqrs.EventBus:
    """An event bus over a publisher and a subscriber: events travel by ``event.<Name>``. Each handler has a group of
    its own, ``<group_name>.<handler>``: on one group, handlers would share the events between them."""
    return cqrs.EventBus(
        subscriber._own_broker,
        publisher=publisher,
        marshaler=marshaler,
        service=subscriber.group_name,
        group_start="0",
        consumer=subscriber.consumer_name,
        **subscriber.bus_options,
    )
