"""Order by key, within one consumer."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict

from messaging_chapters.chapter import QUICK, Chapter, RecordingHandler, nothing_pending, running
from messaging_chapters.recovery import abandon
from millstream.broker.broker import Broker
from millstream.broker.keys import companion_key
from millstream.messaging import Message, Publisher, Subscriber
from millstream.testing.faults import Fault, FaultyTransport
from millstream.wire.commands import Batch, Command


def keyed(key: str, number: int) -> Message:
    return Message(b"%d" % number, {"key": key})


class OrderingChapter(Chapter):
    async def test_one_key_in_order_different_keys_side_by_side(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *(keyed("abc"[n % 3], n) for n in range(60)))
        under_way: dict[str | None, int] = defaultdict(int)

        async def wait(message: Message) -> None:
            under_way[message.key] += 1
            assert under_way[message.key] == 1
            await asyncio.sleep(random.random() / 200)  # varies the order
            under_way[message.key] -= 1

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, ordered_by_key=True):
            await recorder.have(60)
            await nothing_pending(broker, topic)
        for key in "abc":
            own = [int(message.payload) for message in recorder.messages if message.key == key]
            assert own == sorted(own)
        assert recorder.max_running == 3

    async def test_retry_delays_later_messages_of_its_key_only(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *(keyed(key, n) for n in range(3) for key in ("slow", "quick")))

        async def fails(message: Message) -> None:
            if message.key == "slow" and message.payload == b"0" and message.times_delivered < 4:
                await message.nack(delay_ms=60)

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, ordered_by_key=True):
            await recorder.have(9)
            await nothing_pending(broker, topic)
        slow = [(message.payload, message.times_delivered) for message in recorder.messages if message.key == "slow"]
        assert slow == [(b"0", 1), (b"0", 2), (b"0", 3), (b"0", 4), (b"1", 1), (b"2", 1)]
        assert [message.key for message in recorder.messages].index("slow", 1) > 2, "the other key went on meanwhile"

    async def test_retry_whose_reply_was_lost_still_delays_its_key(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """A retry is counted before it starts. If the reply is lost, the repeated count is refused, although the entry
        is still this consumer's."""
        await publisher.publish(topic, *(keyed("k", n) for n in range(4)))
        lost: list[Command | Batch] = []

        def lose_the_first_count(request: Command | Batch) -> Fault | None:
            if lost or not isinstance(request, Command) or b"start" not in request.args:
                return None
            lost.append(request)
            return Fault.answer_lost()

        async def fails(message: Message) -> None:
            if message.payload == b"1" and message.times_delivered == 1:
                raise ValueError("once")

        recorder = RecordingHandler(fails)
        cut = Broker(FaultyTransport(broker.transport, lose_the_first_count), broker.context)
        async with running(cut, topic, recorder, ordered_by_key=True):
            await recorder.have(5)
            await nothing_pending(broker, topic)
        assert lost
        started = [(message.payload, message.times_delivered) for message in recorder.messages]
        assert started == [(b"0", 1), (b"1", 1), (b"1", 2), (b"2", 1), (b"3", 1)]

    async def test_key_continues_after_its_message_is_dead_lettered(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *(keyed("k", n) for n in range(3)))

        async def fails(message: Message) -> None:
            if message.payload == b"0":
                raise ValueError("never")

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, ordered_by_key=True, max_deliveries=2):
            await recorder.have(4)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"0", b"0", b"1", b"2"]

    async def test_recovered_entries_of_a_key_come_before_new_ones(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *(keyed("k", n) for n in range(4)))
        await abandon(broker, topic, "me", count=2)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, consumer="me", ordered_by_key=True):
            await recorder.have(4)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"0", b"1", b"2", b"3"]

    async def test_recovered_entries_precede_new_ones_even_without_capacity_for_all(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """A process that died had entries of more keys than the new owner isolates at a time."""
        await publisher.publish(topic, *(keyed(f"k{n % 13}", n) for n in range(100)))
        await abandon(broker, topic, "me", count=40)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, consumer="me", ordered_by_key=True, max_in_flight=20, count=10):
            await recorder.have(100)
            await nothing_pending(broker, topic)
        for key in range(13):
            assert [n for n in map(int, recorder.payloads) if n % 13 == key] == list(range(key, 100, 13))

    async def test_a_stream_is_not_read_while_its_lease_is_not_certain(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Another process may own it by now, and would handle the entries of this process after later ones."""
        certain = False
        recorder, seen_other = RecordingHandler(), RecordingHandler()
        options = {"group": "g", "consumer": "me", **QUICK}
        leased, other = Subscriber(broker, **options), Subscriber(broker, **options)
        leased.begin_only_until(lambda: math.inf if certain else 0.0)
        await publisher.publish(topic, *(keyed("k", n) for n in range(5)))
        reading = [leased.consume(topic, recorder), other.consume(f"{topic}-other", seen_other)]
        tasks = [asyncio.create_task(item) for item in reading]
        for number in range(3):
            await publisher.publish(f"{topic}-other", keyed("k", number))
            await seen_other.have(number + 1)
        assert (await broker.xpending(topic, "g")).count == 0, "the others are read, and this one is not"
        certain = True
        await recorder.have(5)
        await nothing_pending(broker, topic)
        for subscriber in (leased, other):
            await subscriber.close()
        await asyncio.gather(*tasks)

    async def test_a_key_keeps_its_order_when_its_reader_closes_before_a_retry(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """As when a stream is transferred to another member."""
        await publisher.publish(topic, *(keyed("k", n) for n in range(5)))

        async def fails(message: Message) -> None:
            if message.payload == b"1" and message.times_delivered == 1:
                await message.nack(delay_ms=300_000)

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, ordered_by_key=True):
            await recorder.have(2)
        async with running(broker, topic, recorder, ordered_by_key=True):
            await recorder.have(6)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"0", b"1", b"1", b"2", b"3", b"4"]

    async def test_a_function_may_name_the_key(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *(Message(b"%d" % n) for n in range(20)))

        async def wait(message: Message) -> None:
            await asyncio.sleep(0.001)

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, ordered_by_key=lambda message: str(int(message.payload) % 2)):
            await recorder.have(20)
            await nothing_pending(broker, topic)
        assert recorder.max_running == 2

    async def test_message_whose_key_function_fails_is_dead_lettered(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        ordered = [keyed("k", n) for n in range(4)]
        await publisher.publish(topic, *ordered[:2], Message(b"no key"), Message(b"[]", {"key": "list"}), *ordered[2:])

        def key_of(message: Message) -> str:
            key = message.metadata["key"]
            return [] if key == "list" else key  # type: ignore[return-value]  # what cannot be a key

        recorder = RecordingHandler()
        async with running(broker, topic, recorder, ordered_by_key=key_of):
            await recorder.have(4)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"0", b"1", b"2", b"3"]
        kinds = [entry.fields[b"dlq.error_type"] for entry in await broker.xrange(companion_key(topic, "dlq"))]
        assert sorted(kinds) == [b"KeyError", b"TypeError"]
