"""``async for message in subscriber.subscribe(topic)``: the caller settles the messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging_chapters.chapter import QUICK, Chapter, RecordingHandler, nothing_pending, numbered, running
from millstream.broker.broker import Broker
from millstream.messaging import AlreadySubscribed, Message, Publisher, Subscriber
from millstream.messaging.errors import TooLateToSettle
from millstream.messaging.settings import default_consumer
from millstream.testing.waiting import eventually


class IteratingChapter(Chapter):
    def subscriber(self, broker: Broker, **options: Any) -> Subscriber:
        return Subscriber(broker, **{"group": "g", **QUICK, **options})

    async def test_messages_come_in_order(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(20))
        got: list[bytes] = []
        async with self.subscriber(broker) as subscriber:
            async for message in subscriber.subscribe(topic):
                got.append(message.payload)
                await message.ack()
                if len(got) == 20:
                    break
        assert got == [b"%d" % n for n in range(20)]
        await nothing_pending(broker, topic)

    async def test_nacked_message_is_redelivered(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"x"))
        async with self.subscriber(broker) as subscriber:
            counts = []
            async for message in subscriber.subscribe(topic):
                counts.append(message.times_delivered)
                if len(counts) == 3:
                    await message.ack()
                    break
                await message.nack(delay_ms=0)
        assert counts == [1, 2, 3]
        await nothing_pending(broker, topic)

    async def test_no_more_than_allowed_is_unsettled(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(5))
        async with self.subscriber(broker, max_in_flight=2) as subscriber:
            messages = subscriber.subscribe(topic)
            first, second = await anext(messages), await anext(messages)
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.wait([waiting], timeout=0.2)
            assert not waiting.done()

            await first.ack()
            third = await waiting
            assert third.payload == b"2"
            await second.ack()
            await third.ack()

    async def test_leaving_the_loop_returns_messages_that_were_not_yielded(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(10))
        async with self.subscriber(broker, consumer="one") as subscriber:
            async for message in subscriber.subscribe(topic):
                await message.ack()
                break
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(9)
        assert {message.times_delivered for message in recorder.messages} == {1}

    async def test_closing_ends_the_loop(self, broker: Broker, topic: str) -> None:
        subscriber = self.subscriber(broker)

        async def iterate() -> list[Message]:
            return [message async for message in subscriber.subscribe(topic)]

        task = asyncio.create_task(iterate())
        await eventually(lambda: subscriber.ready)
        await subscriber.close()
        assert await task == []

    async def test_close_waits_for_what_is_in_flight_up_to_a_limit(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(2))
        subscriber = self.subscriber(broker, consumer="one")
        messages = subscriber.subscribe(topic)
        first, _ = await anext(messages), await anext(messages)
        closing = asyncio.create_task(subscriber.close(timeout_ms=400))
        await asyncio.sleep(0)
        await first.ack()
        await closing

        (remaining,) = await broker.xpending_range(topic, "g")
        assert remaining.times_delivered == 1
        assert remaining.idle_ms > QUICK["claim_interval_ms"] * 1000, "others need not wait for it"

    async def test_settling_after_the_end_is_an_error(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        """The outcome would be ignored: the message was returned to the group and is redelivered."""
        await publisher.publish(topic, Message(b"x"))
        subscriber = self.subscriber(broker)
        message = await anext(subscriber.subscribe(topic))
        await subscriber.close(timeout_ms=0)

        with pytest.raises(TooLateToSettle):
            await message.ack()
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(1)
        assert recorder.messages[0].times_delivered == 2

    async def test_subscriber_closed_before_subscribe_yields_nothing(self, broker: Broker, topic: str) -> None:
        subscriber = self.subscriber(broker)
        await subscriber.close()
        await subscriber.close()

        assert [message async for message in subscriber.subscribe(topic)] == []
        await subscriber.consume(topic, RecordingHandler())
        assert not subscriber.ready

    async def test_reading_a_topic_twice_is_refused(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        recorder = RecordingHandler()
        async with running(broker, topic, recorder) as subscriber:
            await eventually(lambda: subscriber.ready)
            with pytest.raises(AlreadySubscribed):
                await subscriber.consume(topic, recorder)
            await publisher.publish(topic, *numbered(1))
            await recorder.have(1)  # the first one reads on

    async def test_topic_is_read_once_per_consumer_name(self, broker: Broker, topic: str) -> None:
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, consumer="one") as subscriber:
            await eventually(lambda: subscriber.ready)
            with pytest.raises(AlreadySubscribed):
                await self.subscriber(broker, consumer="one").consume(topic, recorder)
        async with running(broker, topic, recorder, consumer="one") as subscriber:
            await eventually(lambda: subscriber.ready)

    async def test_two_subscribers_of_one_process_have_two_names(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Under one name the second would recover the in-flight entries of the first."""
        await publisher.publish(topic, *numbered(20))
        both_at_work = asyncio.Event()

        async def wait(message: Message) -> None:
            if len({item.consumer for item in recorder.messages}) == 2:
                both_at_work.set()
            await both_at_work.wait()

        recorder = RecordingHandler(wait)
        first, second = self.subscriber(broker, max_in_flight=10), self.subscriber(broker, max_in_flight=10)
        async with first, second:
            tasks = [asyncio.create_task(first.consume(topic, recorder))]
            await recorder.have(10)
            tasks.append(asyncio.create_task(second.consume(topic, recorder)))
            await recorder.have(20)
            await nothing_pending(broker, topic)
            await first.close()
            await second.close()
            await asyncio.gather(*tasks)
        assert sorted(int(payload) for payload in recorder.payloads) == list(range(20))
        names = sorted({str(message.consumer) for message in recorder.messages})
        assert names == [default_consumer(), f"{default_consumer()}-2"]

    async def test_a_topic_may_be_read_again_after_leaving_the_loop(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(3))
        got = []
        async with self.subscriber(broker) as subscriber:
            for _ in range(3):
                async for message in subscriber.subscribe(topic):
                    got.append(message.payload)
                    await message.ack()
                    break
        assert sorted(got) == [b"0", b"1", b"2"]
