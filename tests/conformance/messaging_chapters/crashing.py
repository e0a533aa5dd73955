"""Crashing: an exception of a handler fails its message, not its subscriber, and no message stays in flight forever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging_chapters.chapter import Chapter, EventLog, RecordingHandler, nothing_pending, numbered, running
from millstream.broker.broker import Broker
from millstream.broker.context import Context
from millstream.broker.keys import companion_key
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.messaging.failure import read_details
from millstream.testing.faults import Fault, FaultyTransport
from millstream.testing.waiting import eventually


class UnknownBaseException(BaseException):
    """A BaseException of a library."""


class UnprintableError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


class CrashingChapter(Chapter):
    @pytest.mark.parametrize("crash", [SystemExit, GeneratorExit, asyncio.CancelledError, UnknownBaseException])
    @pytest.mark.parametrize("max_in_flight", [1, 10])
    async def test_exception_of_a_handler_fails_only_its_message(
        self, broker: Broker, publisher: Publisher, topic: str, crash: type[BaseException], max_in_flight: int
    ) -> None:
        await publisher.publish(topic, *numbered(20))

        async def crashes(message: Message) -> None:
            if message.payload == b"7":
                raise crash("out of here")

        recorder = RecordingHandler(crashes)
        async with running(broker, topic, recorder, max_deliveries=3, max_in_flight=max_in_flight):
            await recorder.have(22)
            await nothing_pending(broker, topic)

        assert recorder.payloads.count(b"7") == 3
        (letter,) = await broker.xrange(companion_key(topic, "dlq"))
        kind = b"HandlerCancelled" if crash is asyncio.CancelledError else b"HandlerCrashed"
        assert letter.fields[b"dlq.error_type"].endswith(kind)
        assert crash.__name__.encode() in letter.fields[b"dlq.error"]

    @pytest.mark.parametrize("max_in_flight", [1, 10])
    async def test_message_whose_handler_cancels_its_own_task_fails(
        self, broker: Broker, publisher: Publisher, topic: str, max_in_flight: int
    ) -> None:
        await publisher.publish(topic, *numbered(5))

        async def crashes(message: Message) -> None:
            if message.payload == b"2":
                await cancels_itself()

        recorder = RecordingHandler(crashes)
        async with running(broker, topic, recorder, max_deliveries=2, max_in_flight=max_in_flight):
            await recorder.have(6)
            await nothing_pending(broker, topic)
        assert await broker.xlen(companion_key(topic, "dlq")) == 1

    @pytest.mark.parametrize("crash", [SystemExit, asyncio.CancelledError, UnknownBaseException])
    async def test_exception_of_a_fanout_handler_fails_only_its_message(
        self, broker: Broker, publisher: Publisher, topic: str, crash: type[BaseException]
    ) -> None:
        async def crashes(message: Message) -> None:
            if message.payload == b"1":
                raise crash("out of here")

        await publisher.publish(topic, *numbered(3))
        recorder, events = RecordingHandler(crashes), EventLog()
        subscriber = Subscriber(events.observe(broker), group=None)
        task = asyncio.create_task(subscriber.consume(topic, recorder, start="0"))
        await recorder.have(3)
        await subscriber.close()
        await task
        assert len(events.all("messaging.handler_failed", "error_type")) == 1

    @pytest.mark.parametrize("ordered", [False, True])
    async def test_uncounted_retries_never_lead_to_a_dead_letter(
        self, broker: Broker, publisher: Publisher, topic: str, ordered: bool
    ) -> None:
        await publisher.publish(topic, Message(b"0", {"key": "k"}), Message(b"1", {"key": "k"}))
        away = 10

        async def not_now(message: Message) -> None:
            nonlocal away
            away -= 1
            if away >= 0:
                raise RetryLater("away", delay_ms=1, charged=False)

        recorder = RecordingHandler(not_now)
        async with running(broker, topic, recorder, max_deliveries=2, ordered_by_key=ordered):
            await recorder.have(12)
            await nothing_pending(broker, topic)
        assert {message.times_delivered for message in recorder.messages} == {1}
        assert await broker.xlen(companion_key(topic, "dlq")) == 0
        if ordered:
            assert recorder.payloads == [b"0"] * 11 + [b"1"]

    @pytest.mark.parametrize(
        "error", [UnprintableError(), ValueError("half a character: \ud800"), ValueError("x" * 10**6)]
    )
    async def test_long_error_text_is_shortened(
        self, broker: Broker, publisher: Publisher, topic: str, error: Exception
    ) -> None:
        await publisher.publish(topic, *numbered(3))

        async def fails(message: Message) -> None:
            if message.payload == b"1":
                raise error

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, max_deliveries=2, max_in_flight=1):
            await recorder.have(4)
            await nothing_pending(broker, topic)
        (letter,) = await broker.xrange(companion_key(topic, "dlq"))
        details = read_details(letter.fields)
        assert details is not None
        assert details.error_type.rpartition(".")[2] == type(error).__name__
        assert 0 < len(details.error) < 10_000

    async def test_failing_observer_does_not_change_outcomes(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(5))

        def fails(name: str, /, **facts: Any) -> None:
            raise LookupError(name)

        async def fails_once(message: Message) -> None:
            if message.times_delivered == 1:
                raise ValueError("not yet")

        recorder = RecordingHandler(fails_once)
        async with running(Broker(broker.transport, Context(observer=fails)), topic, recorder):
            await recorder.have(10)
            await nothing_pending(broker, topic)

    async def test_without_a_group_closing_does_not_wait_for_a_broker_that_is_away(
        self, broker: Broker, topic: str
    ) -> None:
        away = Broker(FaultyTransport(broker.transport, lambda request: Fault.refused()), Context())
        subscriber = Subscriber(away, group=None)
        task = asyncio.create_task(subscriber.consume(topic, RecordingHandler()))
        await asyncio.sleep(0)
        await subscriber.close(timeout_ms=10)
        await asyncio.wait_for(task, 60)

    async def test_invalid_delay_is_refused_by_the_call(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        delays: list[Any] = [-1, 1.5, float("inf"), "soon"]

        async def nack(message: Message) -> None:
            if delays:
                await message.nack(delay_ms=delays.pop())

        await publisher.publish(topic, Message(b"x"))
        recorder = RecordingHandler(nack)
        async with running(broker, topic, recorder):
            await recorder.have(5)
            await nothing_pending(broker, topic)
        await eventually(lambda: not delays)
