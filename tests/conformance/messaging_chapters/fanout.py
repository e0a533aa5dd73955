"""Fanout: every subscriber receives every message, without a group and without pending entries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging_chapters.chapter import Chapter, RecordingHandler, numbered, running
from millstream.broker.broker import Broker
from millstream.errors import InvalidArgument
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.errors import NothingToSettle
from millstream.testing.faults import Fault, FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Batch, Command


class FanoutChapter(Chapter):
    async def test_every_instance_gets_every_message(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"before"))
        one_recorder, other = RecordingHandler(), RecordingHandler()
        async with (
            running(broker, topic, one_recorder, group=None) as first,
            running(broker, topic, other, group=None) as second,
        ):
            await eventually(lambda: first.ready and second.ready)
            await publisher.publish(topic, *numbered(50))
            await one_recorder.have(50)
            await other.have(50)
        assert one_recorder.payloads == other.payloads == [b"%d" % n for n in range(50)]
        assert await broker.group_info(topic) == []

    async def test_fanout_may_start_at_any_id(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        ids = await publisher.publish(topic, *numbered(5))
        async with Subscriber(broker, group=None) as subscriber:
            for start, expected in (("0", b"0"), (ids[2], b"3")):
                async for message in subscriber.subscribe(topic, start=start):
                    assert message.payload == expected
                    break

    async def test_a_stream_replaced_by_one_with_smaller_ids_is_read_from_its_start(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, group=None, block_ms=50) as subscriber:
            await eventually(lambda: subscriber.ready)
            await publisher.publish(topic, Message(b"first"))
            await recorder.have(1)
            [entry] = await broker.xrange(topic)
            await broker.delete(topic)
            await broker.xadd(topic, entry.fields, id="5-1")
            await broker.xadd(topic, entry.fields, id="5-2")
            await recorder.have(3)
            await broker.xadd(topic, entry.fields, id="5-3")
            await recorder.have(4)
        assert recorder.payloads == [b"first"] * 4

    async def test_nothing_is_missed_between_two_reads(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        async with Subscriber(broker, group=None, block_ms=50) as subscriber:
            messages = subscriber.subscribe(topic)
            waiting = asyncio.ensure_future(anext(messages))
            await eventually(lambda: subscriber.ready)
            got: list[bytes] = []
            for message in numbered(20):
                await publisher.publish(topic, message)
                await asyncio.sleep(0)
            while len(got) < 20:
                got.append((await waiting).payload)
                waiting = asyncio.ensure_future(anext(messages))
            waiting.cancel()
            assert got == [b"%d" % n for n in range(20)]

    async def test_nack_is_refused_and_ack_does_nothing_without_a_group(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(2))
        async with Subscriber(broker, group=None) as subscriber:
            messages = subscriber.subscribe(topic, start="0")
            await (await anext(messages)).ack()
            with pytest.raises(NothingToSettle):
                await (await anext(messages)).nack()

    async def test_a_failing_handler_and_a_broken_read_stop_nothing(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        calls: list[int] = []

        def sometimes(request: Command | Batch) -> Fault | None:
            if isinstance(request, Command) and request.args[0] == b"XREAD":
                calls.append(1)
                return Fault.answer_lost() if len(calls) == 2 else None
            return None

        async def fails(message: Message) -> Any:
            if message.payload == b"1":
                raise ValueError("no")

        recorder = RecordingHandler(fails)
        cut = Broker(FaultyTransport(broker.transport, sometimes), broker.context)
        async with running(cut, topic, recorder, group=None) as subscriber:
            await eventually(lambda: subscriber.ready)
            for message in numbered(5):
                await publisher.publish(topic, message)
            await recorder.have(5)
        assert recorder.payloads == [b"%d" % n for n in range(5)]

    async def test_a_group_has_no_other_start(self, broker: Broker, topic: str) -> None:
        subscriber = Subscriber(broker, group="g", group_start="0")
        with pytest.raises(InvalidArgument, match="start"):
            await subscriber.consume(topic, RecordingHandler(), start="0")
