"""Entries that others took while they were held here: nothing waits for them, and nobody is blamed for it. In virtual
time, so that what a busy machine does to leases and signs of life is not in it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker import Link
from millstream.broker.steps.script import script
from millstream.errors import BrokerUnavailable
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.testing import Fault, FaultyLink
from millstream.wire.commands import Batch, Command
from virtual_time import run_in_virtual_time

SWEEP = script("sweep").sha


def words_of(request: Command | Batch) -> list[tuple[Any, ...]]:
    commands = [request] if isinstance(request, Command) else request.commands
    return [tuple(one.args if isinstance(one, Command) else one) for one in commands]


@pytest.mark.parametrize("charged", [True, False])
@pytest.mark.parametrize("delay_ms", [1, 5_000])
def test_a_retry_of_what_others_took_meanwhile_is_not_started_here_and_its_key_goes_on(
    delay_ms: int, charged: bool
) -> None:
    handled: list[tuple[bytes, int]] = []
    told: list[str] = []

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: told.append(name)) as broker:
            at_work = asyncio.Event()

            async def handle(message: Message) -> None:
                handled.append((message.payload, message.times_delivered))
                if message.payload == b"0":
                    at_work.set()
                    while "messaging.lost" not in told:
                        await asyncio.sleep(0.01)
                    raise RetryLater(delay_ms=delay_ms, charged=charged)

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000, ordered_by_key=True
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            async with Publisher(broker) as publisher:
                ids = await publisher.publish("t", *(Message(b"%d" % n, {"key": "k"}) for n in range(2)))
            await at_work.wait()
            await broker.xclaim("t", "g", "another", [ids[0]], min_idle_ms=0, retry_count=2)
            await broker.xack("t", "g", ids[0])
            await asyncio.sleep(30)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert handled == [(b"0", 1), (b"1", 1)]


def test_what_a_sweep_took_back_unheard_does_not_look_like_another_process_of_the_same_name() -> None:
    told: list[str] = []
    handled: list[int] = []
    lost: list[Command | Batch] = []

    def lose_the_answer(request: Command | Batch) -> Fault | None:
        if lost or not any(words[:2] == (b"EVALSHA", SWEEP) for words in words_of(request)):
            return None
        lost.append(request)
        return Fault.answer_lost()

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: told.append(name)) as inside:
            broker = Broker(FaultyLink(inside.link, lose_the_answer), inside.context)
            at_work, go_on = asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                handled.append(message.times_delivered)
                at_work.set()
                await go_on.wait()

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=60_000, claim_interval_ms=500
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            entry = await inside.xadd("t", {"payload": b"x"})
            await at_work.wait()
            # Another member had it in hand, and died.
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0, retry_count=2, idle_ms=70_000)
            while not lost:
                await asyncio.sleep(0.1)
            go_on.set()
            await asyncio.sleep(10)
            assert "messaging.ack_refused" in told
            assert "messaging.consumer_shared" not in told
            await asyncio.sleep(300)
            assert (await inside.xpending("t", "g")).count == 0
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert len(handled) == 2, "the other one may not have been done with it"


def test_an_outage_while_it_is_asked_why_entries_were_lost_ends_no_heartbeat() -> None:
    told: list[str] = []
    refused: list[Command | Batch] = []

    def refuse_the_question(request: Command | Batch) -> Fault | None:
        if refused or words_of(request)[0][0] != b"PTTL":
            return None
        refused.append(request)
        return Fault.refused()

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: told.append(name)) as inside:
            broker = Broker(FaultyLink(inside.link, refuse_the_question), inside.context)
            at_work = asyncio.Event()

            async def handle(message: Message) -> None:
                at_work.set()
                while "messaging.lost" not in told:
                    await asyncio.sleep(0.01)

            subscriber = Subscriber(broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000)
            task = asyncio.create_task(subscriber.consume("t", handle))
            entry = await inside.xadd("t", {"payload": b"x"})
            await at_work.wait()
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0)
            await asyncio.sleep(10)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert refused
    assert "messaging.keeping_failed" in told
    assert "messaging.part_restarted" not in told


class HeldBack(FaultyLink):
    """On a cluster an answer waits for those of other nodes. Two sweeps bring the same entry: one takes it over from a
    dead member, the other looks under the own name. The second is heard of when a handler has been started."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.taken, self.looked, self.started = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def call(self, command: Command) -> Any:
        if command.args[0] == b"XREADGROUP" and self.taken.is_set() and not self.looked.is_set():
            raise BrokerUnavailable("planted: no answer", may_have_been_applied=True)  # so that it looks
        reply = await super().call(command)
        if command.args[:2] == (b"EVALSHA", SWEEP) and reply[1]:
            if not self.taken.is_set():
                self.taken.set()
                await self.looked.wait()
                await asyncio.sleep(0.01)  # an answer takes a moment
            elif not self.looked.is_set():
                self.looked.set()
                await self.started.wait()
        return reply


def test_an_answer_that_comes_late_does_not_take_back_what_was_counted_meanwhile() -> None:
    told: list[str] = []
    handled: list[int] = []

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: told.append(name)) as inside:
            link = HeldBack(inside.link)

            async def handle(message: Message) -> None:
                handled.append(message.times_delivered)
                link.started.set()
                await asyncio.sleep(2)

            entry = await inside.xadd("t", {"payload": b"x"})
            await inside.create_group("t", "g", start="0")
            await inside.xreadgroup("t", "g", "another")
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0, retry_count=1, idle_ms=70_000)
            broker = Broker(link, inside.context)
            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=60_000, block_ms=100
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            await asyncio.sleep(30)
            assert (await inside.xpending("t", "g")).count == 0
            await subscriber.close()
            await task

            assert link.looked.is_set()

    run_in_virtual_time(main())
    assert handled == [2], "the dead one's start, and ours"
    assert "messaging.ack_refused" not in told
    assert "messaging.consumer_shared" not in told
