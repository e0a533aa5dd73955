"""Publishing to many topics at once: their appends share round trips."""

from __future__ import annotations

import asyncio
from typing import Any

from counting_broker import CountingBroker

from millstream import Broker, open_broker
from millstream.messaging import Message, Publisher
from millstream.messaging.batching import MAX_SEPARATE_APPENDS, MAX_SHARED_APPENDS
from millstream.testing import FaultyTransport
from millstream.testing.faults import Fault
from millstream.wire import Batch, Command

TOPICS = 200


class RemoteBroker(CountingBroker):
    """Each operation takes a turn of the event loop, as a round trip to a server does."""

    async def run(self, operation: Any, /, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return await super().run(operation, *args, **options)


async def payloads(broker: Broker) -> list[list[bytes]]:
    return [[entry.fields[b"payload"] for entry in await broker.xrange(f"t{n}")] for n in range(TOPICS)]


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
        assert counting.asked["append_batches"] == -(-(TOPICS - MAX_SEPARATE_APPENDS) // MAX_SHARED_APPENDS)


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
        assert counting.asked["append_batches"] == 0


async def test_batches_of_a_lost_shared_reply_are_stored_once() -> None:
    lost = [Fault.answer_lost()]

    def choose(request: Command | Batch) -> Fault | None:
        return lost.pop() if lost and isinstance(request, Batch) and len(request.commands) > 1 else None

    async with open_broker("local://") as broker:
        async with Publisher(Broker(FaultyTransport(broker.transport, choose), broker.context)) as publisher:
            ids = await asyncio.gather(
                *(publisher.publish(f"t{n}", Message(b"a"), Message(b"b")) for n in range(TOPICS))
            )
        assert not lost
        assert await payloads(broker) == [[b"a", b"b"]] * TOPICS
        assert ids == [[entry.id for entry in await broker.xrange(f"t{n}")] for n in range(TOPICS)]


async def test_topics_are_published_to_after_their_markers_are_gone() -> None:
    async with open_broker("local://") as broker:
        async with Publisher(RemoteBroker(broker)) as publisher:
            for text in (b"before", b"after"):
                await asyncio.gather(*(publisher.publish(f"t{n}", Message(text)) for n in range(TOPICS)))
                if text == b"before":
                    await broker.transport.call(Command((b"FLUSHALL",)))
        assert await payloads(broker) == [[b"after"]] * TOPICS


async def test_calls_of_all_kinds_keep_their_order_in_shared_round_trips() -> None:
    async with open_broker("local://") as broker:
        async with Publisher(RemoteBroker(broker)) as publisher:
            await asyncio.gather(
                *(
                    publisher.publish(f"t{n}", Message(text), idempotency_key="k" if text == b"2" else None)
                    for text in (b"1", b"2", b"3", b"4")
                    for n in range(TOPICS)
                )
            )
        assert await payloads(broker) == [[b"1", b"2", b"3", b"4"]] * TOPICS


async def test_shared_round_trips_keep_streams_short() -> None:
    async with open_broker("local://", max_stream_len=100) as broker:
        async with Publisher(RemoteBroker(broker), max_batch=50) as publisher:
            for _ in range(10):
                await asyncio.gather(
                    *(
                        publisher.publish(f"t{n}", *(Message(b"x") for _ in range(50)))
                        for n in range(MAX_SEPARATE_APPENDS + 5)
                    )
                )
        for number in range(MAX_SEPARATE_APPENDS + 5):
            assert (await broker.stream_info(f"t{number}")).length < 300


async def test_cancelled_shared_round_trip_ends_its_publishes() -> None:
    async with open_broker("local://") as broker:
        publisher = Publisher(RemoteBroker(broker))
        own = asyncio.current_task()
        for turns in range(4):
            publishes = [asyncio.create_task(publisher.publish(f"t{n}", Message(b"x"))) for n in range(TOPICS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {own, *publishes}:
                task.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait(publishes)
        async with asyncio.timeout(10):
            await publisher.publish("t0", Message(b"last"))
            await publisher.close()
        assert publisher.buffered == 0
        assert (await broker.xrange("t0"))[-1].fields[b"payload"] == b"last"
