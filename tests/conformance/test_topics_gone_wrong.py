"""Topics with errors, or that change while they are read: the documented effect, and none on other topics.

See the iterating chapter for a topic that is read twice under one name, ``test_many_topics`` for a key of another type,
and ``test_router`` for a handler that is registered too late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from messaging_chapters.chapter import QUICK, EventLog

from millstream import open_broker
from millstream.broker.keys import slot_of
from millstream.messaging import Message, PartitionedTopic, Publisher, Subscriber, partition_streams
from millstream.messaging.partitions import OutputTopic
from millstream.testing import ClusterSetup, eventually
from millstream.wire.commands import Command


@pytest.mark.parametrize("publish_to", [None, "bills", PartitionedTopic("bills", 3)])
async def test_processes_with_the_same_consumer_name_lose_nothing_and_report_it(
    broker_url: str, caplog: pytest.LogCaptureFixture, publish_to: OutputTopic | None
) -> None:
    """The second recovers the first one's in-flight messages as its own: they are handled again, but none is
    dead-lettered before it was handled. The first one detects it when it acknowledges, and logs what to do."""
    caplog.set_level("ERROR")
    events = EventLog()
    handled: Counter[bytes] = Counter()
    by: Counter[str] = Counter()
    taken, found_out = asyncio.Event(), asyncio.Event()

    async with (
        open_broker(broker_url) as broker_a,
        open_broker(broker_url) as broker_b,
        open_broker(broker_url) as three,
        Publisher(broker_a) as publisher,
    ):

        def reader(broker: Any, who: str, name: str) -> tuple[Subscriber, Any]:
            async def handle(message: Message) -> Message | None:
                by[who] += 1
                if message.payload != b"s0":
                    await asyncio.sleep(0.005)
                elif who == "first":
                    await taken.wait()
                else:
                    taken.set()
                    await found_out.wait()
                handled[message.payload] += 1
                return Message(message.payload, {"key": message.payload.decode()}) if publish_to else None

            subscriber = Subscriber(broker, group="g", consumer=name, **{**QUICK, "max_in_flight": 5})
            return subscriber, handle

        first, second = reader(events.observe(broker_a), "first", "pod"), reader(broker_b, "second", "pod")
        other = reader(three, "other", "mine")
        tasks = [asyncio.create_task(first[0].consume("shared", first[1], publish_to=publish_to))]
        tasks.append(asyncio.create_task(other[0].consume("alone", other[1])))
        await publisher.publish("shared", *(Message(b"s%d" % n) for n in range(100)))
        await publisher.publish("alone", *(Message(b"a%d" % n) for n in range(20)))
        await eventually(lambda: by["first"] > 5, what="the first to be at work", timeout_s=60)
        tasks.append(asyncio.create_task(second[0].consume("shared", second[1], publish_to=publish_to)))
        await publisher.publish("shared", *(Message(b"s%d" % n) for n in range(100, 200)))
        await eventually(lambda: "messaging.consumer_shared" in events, what="the first to find out", timeout_s=60)
        found_out.set()

        async def all_settled() -> bool:
            pending = [(await broker_a.xpending(topic, "g")).count for topic in ("shared", "alone")]
            return len(handled) == 220 and pending == [0, 0]

        await eventually(all_settled, what="all of it to be handled and acknowledged", timeout_s=60)
        for subscriber, _ in (first, second, other):
            await subscriber.close()
        await asyncio.gather(*tasks)
        assert by["other"] == 20, "no entries of another consumer name were taken"
        bills = ["bills", *partition_streams("bills", 3)]
        stored = sum(await asyncio.gather(*(broker_a.xlen(stream) for stream in bills)))
        if publish_to and broker_a.context.cluster:
            assert stored >= 200, "in another slot what is handled twice is put out twice"
        else:
            assert stored == (200 if publish_to else 0), "what is handled twice is put out once"
    logged = [record.getMessage() for record in caplog.records]
    errors = [text for text in logged if "as consumer 'pod': each recovers the other's in-flight messages" in text]
    assert 1 <= len(errors) <= 2, "once for each of the two"
    assert "Give each process its own consumer name" in errors[0]


async def test_slots_that_move_while_their_topics_are_read(resharded_cluster: ClusterSetup) -> None:
    """A topic with a blocking read and a polled one move to another node; no topic loses a message."""
    cluster = resharded_cluster
    prefix = f"moves:{random.randrange(10**9)}"
    topics = [f"{prefix}:{n}" for n in range(24)]
    handled: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        handled[message.payload] += 1

    moved = {slot_of(topic.encode()): cluster.owner(slot_of(topic.encode())) for topic in (topics[0], topics[-1])}
    async with open_broker(cluster.url) as broker, Publisher(broker) as publisher:
        subscriber = Subscriber(broker, group="g", consumer="me", **QUICK)
        tasks = [asyncio.create_task(subscriber.consume(topic, handle)) for topic in topics]
        sent = 0

        async def publish_to_all() -> None:
            nonlocal sent
            for topic in topics:
                await publisher.publish(topic, Message(b"%d" % sent))
                sent += 1

        try:
            await publish_to_all()
            await eventually(lambda: len(handled) == sent, what="the first round", timeout_s=60)
            for slot, source in moved.items():
                target = next(node for node in cluster.nodes if node is not source)
                moving = asyncio.create_task(asyncio.to_thread(cluster.move, slot, target))
                await publish_to_all()
                await moving
            await publish_to_all()
            await eventually(lambda: len(handled) == sent, what="every message of every topic", timeout_s=60)
            assert not any(task.done() for task in tasks)
            await subscriber.close()
            await asyncio.gather(*tasks)
        finally:
            for topic in topics:
                await broker.delete_stream(topic, companions=True)


async def test_stream_deleted_while_its_group_is_created_is_read(redis_url: str) -> None:
    """After the group is created and before its consumer is, the stream is deleted again: when the topic is joined, and
    when the group is recreated later."""
    handled: list[bytes] = []
    deletions = 0

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with open_broker(redis_url) as broker, open_broker(redis_url) as other, Publisher(other) as publisher:
        send = broker.transport.call

        async def delete_in_between(command: Command) -> Any:
            nonlocal deletions
            if command.args[:2] == (b"XGROUP", b"CREATECONSUMER") and deletions % 3 < 2:
                deletions += 1
                await other.delete("gone")
            return await send(command)

        broker.transport.call = delete_in_between  # type: ignore[method-assign]
        subscriber = Subscriber(broker, group="g", consumer="me", **QUICK)
        task = asyncio.create_task(subscriber.consume("gone", handle))
        await eventually(lambda: subscriber.ready, what="it to be read", timeout_s=60)
        assert deletions == 2
        deletions += 1
        await other.delete("gone")
        await eventually(lambda: deletions == 5, what="the group to be recreated", timeout_s=60)
        await publisher.publish("gone", Message(b"after all"))
        await eventually(lambda: handled == [b"after all"], what="the message", timeout_s=60)
        assert not task.done()
        await subscriber.close()
        await task


async def test_full_topic_receives_nothing_while_a_failing_topic_is_located(
    broker_url: str,
) -> None:
    """After a failed read each of its topics is read alone; a topic without capacity was not part of it."""
    events = EventLog()
    begun: list[bytes] = []
    go_on = asyncio.Event()

    async def handle(message: Message) -> None:
        begun.append(message.payload)
        await go_on.wait()

    async with open_broker(broker_url) as broker, Publisher(broker) as publisher:
        subscriber = Subscriber(events.observe(broker), group="g", consumer="me", **{**QUICK, "max_in_flight": 1})
        tasks = [asyncio.create_task(subscriber.consume(topic, handle)) for topic in ("full", "other", "broken")]
        await publisher.publish("full", *(Message(b"f%d" % n) for n in range(5)))
        await eventually(lambda: begun == [b"f0"], what="the full one to be at work", timeout_s=60)
        for _ in range(5):
            events.events.clear()
            await broker.delete_stream("broken")
            await eventually(
                lambda: "messaging.group_restored" in events, what="the group to be recreated", timeout_s=60
            )
            assert (await broker.xpending("full", "g")).count == 1
        go_on.set()
        await eventually(lambda: len(begun) == 5, what="the rest", timeout_s=60)
        await subscriber.close()
        await asyncio.gather(*tasks)
