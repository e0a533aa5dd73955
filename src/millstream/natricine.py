"""The names of the natricine library over this package: programs migrate by changing their imports.

Positional arguments, defaults and wire format are natricine's, so that old and new processes can share streams and
groups during a migration. Further options are those of Publisher and Subscriber.
"""

from __future__ import annotations

from typing import Any

from millstream import cqrs
from millstream.broker import open_broker
from millstream.cqrs import Depends, Marshaler, PydanticMarshaler
from millstream.errors import InvalidArgument
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
DEFAULT_CLAIM_MIN_IDLE_MS = 60_000
"""The default of Subscriber."""


class RedisStreamPublisher(Publisher):
    """``RedisStreamPublisher(redis)`` with a client of redis-py or a URL; ``publish(topic, *messages)``."""

    def __init__(self, redis: Any, **options: Any) -> None:
        self._own_broker = open_broker(redis)
        super().__init__(self._own_broker, **{"codec": CODEC, **options})

    async def close(self) -> None:
        """Publishes waiting messages and closes its connections; the client passed to the constructor stays open."""
        await super().close()
        await self._own_broker.close()


class RedisStreamSubscriber(Subscriber):
    """``RedisStreamSubscriber(redis, "group", "consumer")``, then ``async for message in subscriber.subscribe(topic)``.

    A new group starts at the beginning of the stream. A message is redelivered after ``nack()``, and moved to the
    dead-letter stream ``{topic}.dlq`` after ``max_deliveries``.
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
        block_ms = _read_block_ms(block_ms, options.get("claim_min_idle_ms"))
        self.bus_options: dict[str, Any] = {"block_ms": block_ms, "count": count, "codec": CODEC, **options}
        """The subscriber options of a bus over this subscriber."""
        named = {"group": group_name, "consumer": consumer_name, "group_start": "0"}
        super().__init__(self._own_broker, **{**named, **self.bus_options})

    async def close(self, timeout_ms: int | None = None) -> None:
        """Ends all subscriptions, returns entries that were not handled to the group, and closes its connections."""
        await super().close(timeout_ms)
        await self._own_broker.close()


def _read_block_ms(block_ms: int, claim_min_idle_ms: object) -> int:
    """The block time of one read. 0 (no limit) and values over the subscriber's limit are reduced to that limit.

    Callers do not notice, because a subscription reads repeatedly.
    """
    if type(block_ms) is not int or block_ms < 0:
        raise InvalidArgument("block_ms", block_ms, "a whole number of 0 or more")
    claim_ms = claim_min_idle_ms if type(claim_min_idle_ms) is int else DEFAULT_CLAIM_MIN_IDLE_MS
    longest = max(1, claim_ms // 3)
    return min(block_ms or longest, longest)


def CommandBus(
    publisher: Publisher, subscriber: RedisStreamSubscriber, marshaler: Marshaler | None = None
) -> cqrs.CommandBus:
    """A command bus over a publisher and a subscriber: topics ``command.<Name>``, in the subscriber's group."""
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
    """An event bus over a publisher and a subscriber: topics ``event.<Name>``.

    Each handler has its own group, ``<group_name>.<handler>``, because handlers of one group would each receive only a
    part of the events.
    """
    return cqrs.EventBus(
        subscriber._own_broker,
        publisher=publisher,
        marshaler=marshaler,
        service=subscriber.group_name,
        group_start="0",
        consumer=subscriber.consumer_name,
        **subscriber.bus_options,
    )
