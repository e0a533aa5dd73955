"""Entries that another consumer claimed while they were in flight here. In virtual time, so that a busy machine does
not affect leases and heartbeats.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker import Transport
from millstream.broker.scripts import groups, settle
from millstream.broker.scripts.script import script
from millstream.errors import BrokerUnavailable
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.model import EntryId
from millstream.testing import Fault, FaultyTransport
from millstream.wire.commands import Batch, Command
from support.virtual_time import run_in_virtual_time

SWEEP = script("sweep").sha


def commands_of(request: Command | Batch) -> list[tuple[Any, ...]]:
    commands = [request] if isinstance(request, Command) else request.commands
    return [tuple(command.args if isinstance(command, Command) else command) for command in commands]


@pytest.mark.parametrize("charged", [True, False])
@pytest.mark.parametrize("delay_ms", [1, 5_000])
def test_retry_of_a_lost_entry_does_not_start_and_its_key_continues(delay_ms: int, charged: bool) -> None:
    handled: list[tuple[bytes, int]] = []
    events: list[str] = []

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: events.append(name)) as broker:
            started = asyncio.Event()

            async def handle(message: Message) -> None:
                handled.append((message.payload, message.times_delivered))
                if message.payload == b"0":
                    started.set()
                    while "messaging.lost" not in events:
                        await asyncio.sleep(0.01)
                    raise RetryLater(delay_ms=delay_ms, charged=charged)

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000, ordered_by_key=True
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            async with Publisher(broker) as publisher:
                ids = await publisher.publish("t", *(Message(b"%d" % n, {"key": "k"}) for n in range(2)))
            await started.wait()
            await broker.xclaim("t", "g", "another", [ids[0]], min_idle_ms=0, retry_count=2)
            await broker.xack("t", "g", ids[0])
            await asyncio.sleep(30)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert handled == [(b"0", 1), (b"1", 1)]


def test_claim_with_a_lost_reply_is_not_taken_for_a_shared_consumer_name() -> None:
    events: list[str] = []
    handled: list[int] = []
    lost: list[Command | Batch] = []

    def lose_reply(request: Command | Batch) -> Fault | None:
        if lost or not any(words[:2] == (b"EVALSHA", SWEEP) for words in commands_of(request)):
            return None
        lost.append(request)
        return Fault.answer_lost()

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: events.append(name)) as inside:
            broker = Broker(FaultyTransport(inside.transport, lose_reply), inside.context)
            started, proceed = asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                handled.append(message.times_delivered)
                started.set()
                await proceed.wait()

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=60_000, claim_interval_ms=500
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            entry = await inside.xadd("t", {"payload": b"x"})
            await started.wait()
            # Another consumer had claimed it, and died.
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0, retry_count=2, idle_ms=70_000)
            while not lost:
                await asyncio.sleep(0.1)
            proceed.set()
            await asyncio.sleep(10)
            assert "messaging.ack_refused" in events
            assert "messaging.consumer_shared" not in events
            await asyncio.sleep(300)
            assert (await inside.xpending("t", "g")).count == 0
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert len(handled) == 2, "the other one may not have been done with it"


class ClaimedBeforeCount:
    """Another consumer claims the entry just before this one counts its delivery."""

    def __init__(self, wrapped: Broker, entry: EntryId) -> None:
        self._wrapped = wrapped
        self._entry = entry
        self.context = wrapped.context
        self.transport = wrapped.transport
        self.counts = 0

    async def run(self, operation: Any, /, *args: Any, **options: Any) -> Any:
        if operation is settle.count_delivery:
            self.counts += 1
            await self._wrapped.xclaim("t", "g", "another", [self._entry], min_idle_ms=0, retry_count=2)
        await asyncio.sleep(0.001)  # a round trip: workers run meanwhile
        return await self._wrapped.run(operation, *args, **options)


def test_entry_that_is_claimed_before_its_delivery_is_counted_does_not_start() -> None:
    handled: list[bytes] = []

    async def main() -> None:
        async with open_broker("local://") as inside:
            entry = await inside.xadd("t", {"payload": b"x"})
            await inside.create_group("t", "g", start="0")
            await inside.xreadgroup("t", "g", "dead")
            broker = ClaimedBeforeCount(inside, entry)

            async def handle(message: Message) -> None:
                handled.append(message.payload)

            subscriber = Subscriber(broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000)
            task = asyncio.create_task(subscriber.consume("t", handle))
            while not broker.counts:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            (pending,) = await inside.xpending_range("t", "g")
            assert (pending.consumer, pending.times_delivered) == ("another", 2)
            await inside.xack("t", "g", entry)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert handled == []


def test_outage_during_an_ownership_check_does_not_stop_heartbeats() -> None:
    events: list[str] = []
    refused: list[Command | Batch] = []

    def refuse_check(request: Command | Batch) -> Fault | None:
        if refused or commands_of(request)[0][0] != b"PTTL":
            return None
        refused.append(request)
        return Fault.refused()

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: events.append(name)) as inside:
            broker = Broker(FaultyTransport(inside.transport, refuse_check), inside.context)
            started = asyncio.Event()

            async def handle(message: Message) -> None:
                started.set()
                while "messaging.lost" not in events:
                    await asyncio.sleep(0.01)

            subscriber = Subscriber(broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000)
            task = asyncio.create_task(subscriber.consume("t", handle))
            entry = await inside.xadd("t", {"payload": b"x"})
            await started.wait()
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0)
            await asyncio.sleep(10)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert refused
    assert "messaging.keeping_failed" in events
    assert "messaging.part_restarted" not in events


class DelayedReply(FaultyTransport):
    """On a Cluster a reply waits for other nodes. Two requests return the same entry: one claims it from a dead
    consumer, the other recovers own entries. The reply of the second arrives after a handler has started."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
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


def test_late_reply_does_not_reduce_the_delivery_count() -> None:
    events: list[str] = []
    handled: list[int] = []

    async def main() -> None:
        async with open_broker("local://", observer=lambda name, /, **_: events.append(name)) as inside:
            transport = DelayedReply(inside.transport)

            async def handle(message: Message) -> None:
                handled.append(message.times_delivered)
                transport.started.set()
                await asyncio.sleep(2)

            entry = await inside.xadd("t", {"payload": b"x"})
            await inside.create_group("t", "g", start="0")
            await inside.xreadgroup("t", "g", "another")
            await inside.xclaim("t", "g", "another", [entry], min_idle_ms=0, retry_count=1, idle_ms=70_000)
            broker = Broker(transport, inside.context)
            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=60_000, block_ms=100
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            await asyncio.sleep(30)
            assert (await inside.xpending("t", "g")).count == 0
            await subscriber.close()
            await task

            assert transport.looked.is_set()

    run_in_virtual_time(main())
    assert handled == [2], "the dead one's start, and ours"
    assert "messaging.ack_refused" not in events
    assert "messaging.consumer_shared" not in events


def test_member_that_was_cut_off_while_the_group_was_recreated_loses_no_unstarted_entry() -> None:
    handled: list[bytes] = []
    cut_off = False

    def unreachable(request: Command | Batch) -> Fault | None:
        return Fault.refused() if cut_off else None

    async def main() -> None:
        nonlocal cut_off
        async with open_broker("local://") as inside:
            broker = Broker(FaultyTransport(inside.transport, unreachable), inside.context)
            started, proceed = asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                started.set()
                await proceed.wait()
                handled.append(message.payload)

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_000, ordered_by_key=True
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            async with Publisher(inside) as publisher:
                ids = await publisher.publish("t", *(Message(b"%d" % n, {"key": "k"}) for n in range(5)))
            await started.wait()
            cut_off = True
            await asyncio.sleep(5)
            await inside.delete_group("t", "g")
            await inside.run(groups.restore_group, "t", "g", ids[-1])
            await asyncio.sleep(5)
            cut_off = False
            await asyncio.sleep(5)
            proceed.set()
            await asyncio.sleep(60)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert set(handled) == {b"0", b"1", b"2", b"3", b"4"}


def test_an_entry_whose_lease_was_uncertain_starts_as_soon_as_it_is_certain() -> None:
    """Not with the next regular heartbeat, which is 20 seconds later."""
    started: list[float] = []

    async def main() -> float:
        async with open_broker("local://") as broker:
            loop, certain = asyncio.get_running_loop(), True

            async def handle(message: Message) -> None:
                nonlocal certain
                started.append(loop.time())
                certain = message.payload == b"1"

            subscriber = Subscriber(broker, group="g", consumer="me", group_start="0", ordered_by_key=True)
            subscriber.begin_only_until(lambda: float("inf") if certain else 0.0)
            task = asyncio.create_task(subscriber.consume("t", handle))
            async with Publisher(broker) as publisher:
                await publisher.publish("t", *(Message(b"%d" % n, {"key": "k"}) for n in range(2)))
            await asyncio.sleep(2)
            assert len(started) == 1
            certain = True
            certain_at = loop.time()
            await asyncio.sleep(5)
            await subscriber.close()
            await task
            return certain_at

    certain_at = run_in_virtual_time(main())
    assert len(started) == 2
    assert started[1] - certain_at < 0.5


def test_an_expired_entry_is_returned_again_after_a_late_heartbeat() -> None:
    """The thread that sends heartbeats for a blocked event loop may be overtaken by the return of the entry."""

    async def main() -> int:
        events: list[str] = []
        async with open_broker("local://", observer=lambda name, /, **_: events.append(name)) as broker:

            async def handle(message: Message) -> None:
                await asyncio.sleep(30)

            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", claim_min_idle_ms=3_600_000, max_hold_ms=150
            )
            task = asyncio.create_task(subscriber.consume("t", handle))
            entry = await broker.xadd("t", {"payload": b"x"})
            while "messaging.hold_expired" not in events:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            await broker.run(settle.heartbeat, "t", "g", "me", [entry], times_delivered=1)
            await asyncio.sleep(5)
            [pending] = await broker.xpending_range("t", "g")
            await subscriber.close(timeout_ms=0)
            await task
            return pending.idle_ms

    assert run_in_virtual_time(main()) > 3_600_000
