"""Surviving: a part of the subscriber that fails with an unexpected error is reported and restarted."""

from __future__ import annotations

import asyncio

import pytest

from messaging_chapters.chapter import (
    QUICK,
    Chapter,
    EventLog,
    RecordingHandler,
    nothing_pending,
    numbered,
    publish_one,
    running,
)
from millstream.broker.broker import Broker
from millstream.broker.scripts.script import script
from millstream.errors import WrongKeyType
from millstream.messaging import Message, Publisher, Router
from millstream.messaging.consumer import Subscriber
from millstream.testing.faults import Fault, FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Batch, Command

UNEXPECTED = "'NoneType' object has no attribute 'readline'"

FAULTS = {
    "joining": b"XGROUP",
    "reading": b"XREADGROUP",
    "sweeping": script("needs_visit").sha,
    "settling": script("settle").sha,
    "due times": script("due_take").sha,
}
"""Where the fault is injected: an argument of every command of that part."""


def arguments_of(request: Command | Batch) -> list[bytes]:
    commands = [request.args] if isinstance(request, Command) else request.commands
    return [argument for args in commands for argument in args[:2]]


class SurvivingChapter(Chapter):
    @pytest.mark.parametrize("where", FAULTS)
    async def test_part_that_fails_with_an_unexpected_error_is_reported_and_restarted(
        self, broker: Broker, publisher: Publisher, topic: str, where: str
    ) -> None:
        injected: list[Command | Batch] = []

        def inject(request: Command | Batch) -> Fault | None:
            if FAULTS[where] in arguments_of(request) and len(injected) < 3:
                injected.append(request)
                return Fault(before=AttributeError(UNEXPECTED))
            return None

        events = EventLog()
        observed = events.observe(broker, FaultyTransport(broker.transport, inject))
        await publisher.publish(topic, *numbered(20))

        async def fails_once(message: Message) -> None:
            if message.times_delivered == 1 and message.payload == b"7":
                await message.nack(delay_ms=1)

        recorder = RecordingHandler(fails_once)
        # Entries that the unexpected error left pending are claimed soon.
        async with running(observed, topic, recorder, claim_min_idle_ms=600) as subscriber:
            await eventually(lambda: len(injected) == 3, what="three faults", timeout_s=60)
            await eventually(lambda: set(recorder.payloads) == {b"%d" % n for n in range(20)}, what="all", timeout_s=60)
            await nothing_pending(broker, topic)
            await publish_one(publisher, topic, b"after")
            await eventually(lambda: b"after" in recorder.payloads, what="the next message")
            await eventually(lambda: subscriber.ready, what="it to be ready")
        assert any(UNEXPECTED in str(values.get("error")) for _, values in events.events)

    async def test_heartbeats_continue_after_an_unexpected_error(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Otherwise other consumers would claim entries whose handlers are still running."""
        beats: list[bool] = []

        def inject(request: Command | Batch) -> Fault | None:
            commands = [request.args] if isinstance(request, Command) else request.commands
            if not any(b"touch" in args for args in commands):
                return None
            beats.append(len(beats) < 3)
            return Fault(before=AttributeError(UNEXPECTED)) if beats[-1] else None

        async def outlasts_three_faults(message: Message) -> None:
            await eventually(lambda: beats.count(False) >= 3, what="heartbeats after the faults", timeout_s=60)

        events = EventLog()
        recorder = RecordingHandler(outlasts_three_faults)
        await publish_one(publisher, topic, b"long")
        injected = events.observe(broker, FaultyTransport(broker.transport, inject))
        async with running(injected, topic, recorder, claim_min_idle_ms=3_000) as subscriber:
            await recorder.have(1)
            await nothing_pending(broker, topic)
            assert subscriber.ready
        assert recorder.payloads == [b"long"], "it was not taken over meanwhile"
        assert any(UNEXPECTED in str(values.get("error")) for _, values in events.events)

    async def test_router_survives_an_unexpected_error_before_its_first_read(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        faults = iter(range(3))
        events = EventLog()

        def inject(_: Command | Batch) -> Fault | None:
            return None if next(faults, None) is None else Fault(before=AttributeError(UNEXPECTED))

        transport = FaultyTransport(broker.transport, inject)
        router = Router(events.observe(broker, transport), **QUICK)
        recorder = RecordingHandler()
        router.add(recorder, topic, group="g")
        running_router = asyncio.create_task(router.run(handle_signals=False))
        try:
            await publisher.publish(topic, Message(b"x"))
            await recorder.have(1)
            assert not running_router.done()
        finally:
            await router.close()
            await running_router
        assert "messaging.part_restarted" in events

    async def test_permanent_error_ends_the_part_and_is_reported(self, broker: Broker, topic: str) -> None:
        events = EventLog()
        await broker.set(topic, "no stream")
        subscriber = Subscriber(events.observe(broker), **{"group": "g", **QUICK})
        with pytest.raises(WrongKeyType):
            await asyncio.wait_for(subscriber.consume(topic, RecordingHandler()), 60)
        assert "messaging.subscription_failed" in events
        assert not subscriber.ready
