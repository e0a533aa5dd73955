"""Bounds: buffers are bounded while the broker is slow or unavailable, and callers wait."""

from __future__ import annotations

import asyncio
from typing import Any

from messaging_chapters.chapter import (
    Chapter,
    HeldBack,
    RecordingHandler,
    nothing_pending,
    numbered,
    running,
)
from millstream.broker.broker import Broker
from millstream.broker.context import Context, Limits
from millstream.broker.keys import companion_key
from millstream.broker.scripts.script import script
from millstream.messaging import Ack, Message, Publisher
from millstream.messaging.publisher import MAX_QUEUES
from millstream.testing.faults import FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Command

STORES_OUTPUTS = script("settle_outputs").sha


class BoundsChapter(Chapter):
    async def test_no_handler_starts_while_too_much_output_waits(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(60))
        held_back = HeldBack(broker, STORES_OUTPUTS)

        async def blow_up(message: Message) -> Message:
            return Message(b"x" * 10_000)

        recorder = RecordingHandler(blow_up)
        output = companion_key(topic, "out").decode()
        options: dict[str, Any] = {"max_in_flight": 50, "max_bytes_in_flight": 100_000, "count": 50}
        async with running(
            Broker(held_back.transport, Context()), topic, recorder, publish_to=output, **options
        ) as subscriber:
            await eventually(lambda: held_back.words, what="outputs that wait")
            await eventually(lambda: len(recorder.messages) >= 10, what="outputs that fill the capacity")
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert len(recorder.messages) == 10
            assert subscriber.ready
            held_back.let_through.set()
            await recorder.have(60)
            await nothing_pending(broker, topic)
        assert await broker.xlen(output) == 60

    async def test_closing_does_not_wait_for_capacity_for_outputs(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(10))
        held_back = HeldBack(broker, STORES_OUTPUTS)

        async def blow_up(message: Message) -> Message:
            return Message(b"x" * 10_000)

        recorder = RecordingHandler(blow_up)
        output = companion_key(topic, "out").decode()
        options: dict[str, Any] = {"max_in_flight": 1, "max_bytes_in_flight": 5_000}
        async with running(
            Broker(held_back.transport, Context()), topic, recorder, publish_to=output, **options
        ) as subscriber:
            await eventually(lambda: held_back.words, what="output that waits")
            closing = asyncio.create_task(subscriber.close())
            await asyncio.sleep(0)
            held_back.let_through.set()
            await closing
        assert len(recorder.messages) == await broker.xlen(output)

    async def test_outputs_of_many_messages_are_stored_in_scripts_of_bounded_size(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(30))
        held_back = HeldBack(broker, STORES_OUTPUTS)
        held_back.let_through.set()
        all_at_once = asyncio.Event()

        async def put_out(message: Message) -> list[Message]:
            if len(recorder.messages) == 30:
                all_at_once.set()
            await all_at_once.wait()
            return [Message(b"%s.%d" % (message.payload, n)) for n in range(5)]

        recorder = RecordingHandler(put_out)
        output = companion_key(topic, "out").decode()
        limited = Broker(held_back.transport, Context(limits=Limits(script_entries=20)))
        async with running(limited, topic, recorder, publish_to=output):
            await recorder.have(30)
            await nothing_pending(broker, topic)
        assert await broker.xlen(output) == 150
        entry = (await broker.xrange(output, count=1))[0]
        # Two keys and the name of the call; three arguments a message; two arguments besides each output's own.
        assert max(held_back.words) <= 3 + 2 + 2 + 4 * 3 + 20 * (2 + 2 * len(entry.fields))

    async def test_cancelled_calls_leave_no_waiting_calls_behind(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"first"))
        transport = FaultyTransport(broker.transport)
        away = asyncio.Event()
        call = transport.call

        async def slow(command: Command) -> Any:
            await away.wait()
            return await call(command)

        transport.call = slow  # type: ignore[method-assign]
        impatient = Publisher(Broker(transport, Context()), max_buffered=5)
        for round_ in range(20):
            tasks = [asyncio.create_task(impatient.publish(topic, message)) for message in numbered(10, round_ * 10)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert impatient.buffered <= 5
        assert impatient.waiting == 0
        last = asyncio.create_task(impatient.publish(topic, Message(b"last")))
        away.set()
        await last
        await impatient.close()
        assert await broker.xlen(topic) <= 1 + 5 + 1

    async def test_ack_with_outputs_without_publish_to_is_dropped(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))

        async def settles(message: Message) -> None:
            message.settle(Ack([Message(b"y")]) if message.times_delivered == 1 else Ack())

        recorder = RecordingHandler(settles)
        async with running(broker, topic, recorder, claim_min_idle_ms=200, block_ms=50):
            await recorder.have(2)
            await nothing_pending(broker, topic)

    async def test_a_publisher_forgets_topics_that_are_idle(self, broker: Broker, topic: str) -> None:
        names = [f"{topic}:{n}" for n in range(MAX_QUEUES + 50)]
        async with Publisher(broker) as publisher:
            for _ in range(2):
                for at in range(0, len(names), 50):
                    await asyncio.gather(
                        *(publisher.publish(name, *numbered(2)) for name in names[at : at + 50] for _ in range(2))
                    )
                    assert len(publisher.readiness) <= MAX_QUEUES
        lengths = [await broker.xlen(name) for name in names]
        assert set(lengths) == {8}
