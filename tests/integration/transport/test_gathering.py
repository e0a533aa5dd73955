"""Commands of one turn of the event loop are sent together: many topics on a node cost one round trip."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream import Broker, Publisher, open_broker
from millstream.broker.transport.async_connection import AsyncConnection
from millstream.messaging import Message


class CountedTransport:
    """A transport that counts what is written to it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.writes: list[int] = []

    def write(self, data: Any) -> None:
        self.writes.append(len(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def counted(broker: Broker) -> CountedTransport:
    """The one connection that tasks share, from now on counted."""
    (connections,) = broker.transport._by_loop.values()  # type: ignore[attr-defined]
    (connection,) = connections._shared.values()
    assert isinstance(connection, AsyncConnection)
    transport = CountedTransport(connection._transport)
    connection._transport = transport  # type: ignore[assignment]
    return transport


async def test_batches_of_many_topics_share_one_round_trip(redis_broker: Broker) -> None:
    topics = [f"t{n}" for n in range(100)]
    async with Publisher(redis_broker) as publisher:
        await publisher.publish("warm", Message(b"x"))  # the connection is open and the script is loaded
        transport = counted(redis_broker)
        ids = await asyncio.gather(*(publisher.publish(topic, Message(topic.encode())) for topic in topics))
    assert len(ids) == 100
    assert len(transport.writes) <= 3, "the first does not wait, all others leave together"
    for topic in topics:
        assert [entry.fields[b"payload"] for entry in await redis_broker.xrange(topic)] == [topic.encode()]


async def test_single_caller_is_not_delayed_by_batching(redis_broker: Broker) -> None:
    await redis_broker.ping()
    transport = counted(redis_broker)
    call = asyncio.create_task(redis_broker.ping())
    await asyncio.sleep(0)
    assert len(transport.writes) == 1, "it was written in the very turn in which it was asked"
    await call


async def test_large_and_small_requests_keep_their_order(redis_url: str) -> None:
    async with open_broker(redis_url) as broker:
        await broker.ping()
        sizes = [10, 200_000, 10, 70_000, 10, 10] * 20
        added = await asyncio.gather(*(broker.xadd("s", {"n": n, "v": b"x" * size}) for n, size in enumerate(sizes)))
        entries = await broker.xrange("s")
        assert [entry.id for entry in entries] == added
        assert [int(entry.fields[b"n"]) for entry in entries] == list(range(len(sizes)))
