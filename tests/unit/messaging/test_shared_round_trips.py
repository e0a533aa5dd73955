"""Publishing to many topics at once: their appends share round trips."""

from __future__ import annotations

import asyncio
from typing import Any

from counting_broker import CountingBroker

from millstream import open_broker
from millstream.messaging import Message, Publisher
from millstream.messaging.batching import MAX_SEPARATE_APPENDS

TOPICS = 200


class RemoteBroker(CountingBroker):
    """Each operation takes a turn of the event loop, as a round trip to a server does."""

    async def run(self, operation: Any, /, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return await super().run(operation, *args, **options)


async def test_publishes_to_many_topics_share_round_trips() -> None:
    async with open_broker("local://") as broker:
        counting = RemoteBroker(broker)
        async with Publisher(counting) as publisher:
            ids = await asyncio.gather(*(publisher.publish(f"t{n}", Message(b"%d" % n)) for n in range(TOPICS)))
        assert [len(stored) for stored in ids] == [1] * TOPICS
        for number in range(TOPICS):
            (entry,) = await broker.xrange(f"t{number}")
            assert entry.fields[b"payload"] == b"%d" % number
        assert counting.asked["append"] == MAX_SEPARATE_APPENDS
        assert counting.asked["command_pipeline"] <= 3


async def test_topic_of_another_type_fails_alone_in_a_shared_round_trip() -> None:
    async with open_broker("local://") as broker:
        await broker.set("t100", "no stream")
        async with Publisher(RemoteBroker(broker), retry_ms=1) as publisher:
            results = await asyncio.gather(
                *(publisher.publish(f"t{n}", Message(b"x")) for n in range(TOPICS)), return_exceptions=True
            )
        assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [100]


async def test_publishes_to_few_topics_are_sent_separately() -> None:
    async with open_broker("local://") as broker:
        counting = RemoteBroker(broker)
        async with Publisher(counting) as publisher:
            await asyncio.gather(*(publisher.publish(f"t{n}", Message(b"x")) for n in range(MAX_SEPARATE_APPENDS)))
        assert counting.asked["command_pipeline"] == 0
