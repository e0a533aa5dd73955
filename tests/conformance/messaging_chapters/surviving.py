"""Surviving: a part of the subscriber that fails with an unexpected error is reported and restarted."""

from __future__ import annotations

import asyncio

import pytest

from messaging_chapters.chapter import (
    QUICK,
    Chapter,
    Seen,
    Told,
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

UNFORESEEN = "'NoneType' object has no attribute 'readline'"

STRIKES = {
    "joining": b"XGROUP",
    "reading": b"XREADGROUP",
    "sweeping": script("needs_visit").sha,
    "settling": script("settle").sha,
    "due times": script("due_take").sha,
}
"""Where it strikes, by a word that every such command holds."""


def words_of(request: Command | Batch) -> list[bytes]:
    commands = [request.args] if isinstance(request, Command) else request.commands
    return [word for args in commands for word in args[:2]]


class SurvivingChapter(Chapter):
    @pytest.mark.parametrize("where", STRIKES)
    async def test_part_that_fails_with_an_unexpected_error_is_reported_and_restarted(
        self, broker: Broker, publisher: Publisher, topic: str, where: str
    ) -> None:
        struck: list[Command | Batch] = []

        def strike(request: Command | Batch) -> Fault | None:
            if STRIKES[where] in words_of(request) and len(struck) < 3:
                struck.append(request)
                return Fault(before=AttributeError(UNFORESEEN))
            return None

        told = Told()
        observed = told.beside(broker, FaultyTransport(broker.transport, strike))
        await publisher.publish(topic, *numbered(20))

        async def fails_once(message: Message) -> None:
            if message.times_delivered == 1 and message.payload == b"7":
                await message.nack(delay_ms=1)

        seen = Seen(fails_once)
        # What an unforeseen error left pending is found again soon.
        async with running(observed, topic, seen, claim_min_idle_ms=600) as subscriber:
            await eventually(lambda: len(struck) == 3, what="it to strike three times", timeout_s=60)
            await eventually(lambda: set(seen.payloads) == {b"%d" % n for n in range(20)}, what="all", timeout_s=60)
            await nothing_pending(broker, topic)
            await publish_one(publisher, topic, b"after")
            await eventually(lambda: b"after" in seen.payloads, what="it to go on")
            await eventually(lambda: subscriber.ready, what="it to be ready")
        assert any(UNFORESEEN in str(facts.get("error")) for _, facts in told.facts)

    async def test_heartbeats_continue_after_an_unexpected_error(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Or else others would take over what a handler is still at work on."""
        beats: list[bool] = []

        def strike(request: Command | Batch) -> Fault | None:
            commands = [request.args] if isinstance(request, Command) else request.commands
            if not any(b"touch" in args for args in commands):
                return None
            beats.append(len(beats) < 3)
            return Fault(before=AttributeError(UNFORESEEN)) if beats[-1] else None

        async def outlasts_three_strikes(message: Message) -> None:
            await eventually(lambda: beats.count(False) >= 3, what="signs of life after the strikes", timeout_s=60)

        told = Told()
        seen = Seen(outlasts_three_strikes)
        await publish_one(publisher, topic, b"long")
        struck = told.beside(broker, FaultyTransport(broker.transport, strike))
        async with running(struck, topic, seen, claim_min_idle_ms=3_000) as subscriber:
            await seen.have(1)
            await nothing_pending(broker, topic)
            assert subscriber.ready
        assert seen.payloads == [b"long"], "it was not taken over meanwhile"
        assert any(UNFORESEEN in str(facts.get("error")) for _, facts in told.facts)

    async def test_router_survives_an_unexpected_error_before_its_first_read(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        strikes = iter(range(3))
        told = Told()

        def strike(_: Command | Batch) -> Fault | None:
            return None if next(strikes, None) is None else Fault(before=AttributeError(UNFORESEEN))

        transport = FaultyTransport(broker.transport, strike)
        router = Router(told.beside(broker, transport), **QUICK)
        seen = Seen()
        router.add(seen, topic, group="g")
        running_router = asyncio.create_task(router.run(handle_signals=False))
        try:
            await publisher.publish(topic, Message(b"x"))
            await seen.have(1)
            assert not running_router.done()
        finally:
            await router.close()
            await running_router
        assert "messaging.part_restarted" in told

    async def test_permanent_error_ends_the_part_and_is_reported(self, broker: Broker, topic: str) -> None:
        told = Told()
        await broker.set(topic, "no stream")
        subscriber = Subscriber(told.beside(broker), **{"group": "g", **QUICK})
        with pytest.raises(WrongKeyType):
            await asyncio.wait_for(subscriber.consume(topic, Seen()), 60)
        assert "messaging.subscription_failed" in told
        assert not subscriber.ready
