"""A group that disappears (FLUSHALL, a failover, a mistake of an operator): duplicates, no loss, and a warning."""

from __future__ import annotations

import asyncio

import pytest

from messaging_chapters.chapter import Chapter, EventLog, RecordingHandler, nothing_pending, numbered, running
from millstream.broker.broker import Broker
from millstream.broker.keys import companion_key, due_key, recreated_key
from millstream.broker.scripts import groups
from millstream.broker.scripts.script import script
from millstream.messaging import Message, Publisher, Rejected
from millstream.messaging.codecs import codec
from millstream.testing.waiting import eventually
from millstream.wire.commands import Batch, Command


async def pending_is(broker: Broker, topic: str, count: int) -> bool:
    return (await broker.xpending(topic, "g")).count == count


async def holds(broker: Broker, stream: str | bytes, payload: bytes) -> bool:
    entries = await broker.xrange(stream)
    return payload in [codec("flat").decode(entry.fields).payload for entry in entries]


class GroupLossChapter(Chapter):
    async def test_reading_goes_on_after_the_last_entry(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(10))
        events = EventLog()
        recorder = RecordingHandler()
        async with running(events.observe(broker), topic, recorder):
            await recorder.have(10)
            await nothing_pending(broker, topic)
            await broker.delete_group(topic, "g")
            await publisher.publish(topic, *numbered(10, 10))
            await recorder.have(20)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"%d" % n for n in range(20)]
        assert events.all("messaging.group_restored", "what") == ["made"]

    async def test_group_is_recreated_before_the_oldest_unacknowledged_entry(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        ids = await publisher.publish(topic, *numbered(6))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            if message.payload == b"2":
                await go_on.wait()

        recorder, other = RecordingHandler(wait), RecordingHandler()
        async with running(broker, topic, recorder, consumer="one"):
            await recorder.have(6)

            async def one_pending() -> bool:
                return (await broker.xpending(topic, "g")).count == 1

            await eventually(one_pending)
            await broker.delete_group(topic, "g")

            async def recreated() -> bool:
                return bool(await broker.group_info(topic))

            await eventually(recreated)
            # Entries are redelivered from the unacknowledged one on, but not the one whose handler is running.
            await eventually(lambda: len(recorder.messages) >= 9)
            assert [message.id for message in recorder.messages[6:9]] == ids[3:]
            go_on.set()
            await nothing_pending(broker, topic)
        assert recorder.payloads.count(b"2") == 1
        assert not other.messages

    async def test_consumer_with_an_earlier_position_moves_the_group_back(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"held by one"))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        first, second = RecordingHandler(wait), RecordingHandler()
        async with running(broker, topic, first, max_in_flight=1, claim_min_idle_ms=1_500, close_timeout_ms=0):
            await first.have(1)
            async with running(broker, topic, second, claim_min_idle_ms=1_500):
                await publisher.publish(topic, *numbered(5))
                await second.have(5)
                await broker.delete_group(topic, "g")
                # The second consumer recreates it at its own position; the first one's heartbeat finds that out.
                await eventually(lambda: b"held by one" in second.payloads, timeout_s=60)
                go_on.set()
                await nothing_pending(broker, topic)

    @pytest.mark.parametrize("ending", ["output", "retry", "details"])
    async def test_consumer_that_misses_the_recreation_loses_nothing(
        self, broker: Broker, publisher: Publisher, topic: str, ending: str
    ) -> None:
        """The group is deleted, and another member recreates it at its own position between two reads of this consumer.
        The next read adds this consumer to the new group, in which none of its in-flight entries is pending."""
        await broker.run(groups.restore_group, f"{topic}:other", "g", "0-0")  # loads the script
        go_on = asyncio.Event()
        tries: list[bytes] = []

        async def wait(message: Message) -> list[Message]:
            tries.append(message.payload)
            if message.payload == b"held":
                await go_on.wait()
                if ending == "details":
                    raise Rejected("not that one")
                if ending == "retry" and tries.count(b"held") == 1:
                    raise ValueError("try again")
            return [Message(message.payload)]

        await publisher.publish(topic, Message(b"held"))
        async with running(broker, topic, wait, publish_to=f"{topic}:out"):
            await eventually(lambda: tries == [b"held"])
            await publisher.publish(topic, Message(b"done by another"))
            await eventually(lambda: len(tries) == 2)
            await eventually(lambda: pending_is(broker, topic, 1))
            last = (await broker.xrevrange(topic, count=1))[0].id
            key = topic.encode()
            made = script("restore_group").evalsha_args(
                (key, due_key(key, b"g"), recreated_key(key, b"g")), (b"g", bytes(last), b"3600000")
            )
            await asyncio.sleep(0.01)  # the mark differs from earlier entries by whole milliseconds
            replies = await broker.transport.call_many(
                Batch([(b"XGROUP", b"DESTROY", key, b"g"), made], key, atomic=True)
            )
            assert replies == [1, b"made"]
            await publisher.publish(topic, Message(b"new"))
            await eventually(lambda: b"new" in tries)
            go_on.set()
            place = companion_key(topic, "dlq") if ending == "details" else f"{topic}:out"
            await eventually(lambda: holds(broker, place, b"held"), what="what it held to be done", timeout_s=20)
            await nothing_pending(broker, topic)

    async def test_after_flushall_new_messages_are_handled(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(5))
        recorder = RecordingHandler()
        async with running(broker, topic, recorder) as subscriber:
            await recorder.have(5)
            await broker.transport.call(Command((b"FLUSHALL",), topic.encode()))
            await publisher.publish(topic, *numbered(5, 5))
            await recorder.have(10)
            await eventually(lambda: subscriber.ready)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"%d" % n for n in range(10)]

    async def test_outcomes_of_lost_entries_are_dropped(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(4))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()
            if message.payload == b"1" and message.times_delivered == 1:
                raise ValueError("after the loss")

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, max_in_flight=4):
            await recorder.have(4)
            await broker.delete_group(topic, "g")
            go_on.set()
            await publisher.publish(topic, Message(b"new"))
            await eventually(lambda: b"new" in recorder.payloads)
            await nothing_pending(broker, topic)
        assert set(recorder.payloads) == {b"0", b"1", b"2", b"3", b"new"}

    async def test_delayed_retry_survives_the_loss_of_its_group(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """No member has it in flight, and it is in no pending entries list any more."""
        await publisher.publish(topic, *numbered(3))

        async def delay(message: Message) -> None:
            if message.payload == b"1" and not go_on.is_set():
                await message.nack(delay_ms=300)

        go_on = asyncio.Event()
        recorder = RecordingHandler(delay)
        async with running(broker, topic, recorder) as subscriber:
            await recorder.have(3)

            async def one_pending() -> bool:
                return (await broker.xpending(topic, "g")).count == 1

            await eventually(one_pending)
            go_on.set()
            await broker.transport.call(Command((b"XGROUP", b"DESTROY", topic.encode(), b"g"), topic.encode()))
            await eventually(lambda: recorder.payloads.count(b"1") >= 2, what="another delivery")
            await nothing_pending(broker, topic)
            assert subscriber.ready
        assert recorder.max_running <= 3
