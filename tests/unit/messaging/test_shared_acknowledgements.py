"""Acknowledgements of many topics share a script; a topic whose entries were claimed is settled alone."""

from __future__ import annotations

import asyncio
from collections import Counter

from millstream import Broker, open_broker
from millstream.broker.scripts.script import script
from millstream.errors import BrokerUnavailable, MillstreamError, PermissionDenied
from millstream.messaging import Message, Router
from millstream.testing import FaultyTransport, eventually
from millstream.testing.faults import Fault
from millstream.wire import Batch, Command

TOPICS = 20
ACK_STREAMS = script("ack_streams").sha


class Acks:
    """Counts the scripts that acknowledge entries of many topics, and lets the first one fail."""

    def __init__(self, error: MillstreamError | None = None) -> None:
        self.streams: list[int] = []
        self._error = error

    def choose(self, request: Command | Batch) -> Fault | None:
        for args in [request.args] if isinstance(request, Command) else request.commands:
            if args[0] == b"EVALSHA" and args[1] == ACK_STREAMS:
                self.streams.append(int(args[2]))
                if self._error is not None:
                    error, self._error = self._error, None
                    return Fault(before=error)
        return None


async def handle_all(acks: Acks, events: Counter[str], claimed: str | None = None) -> list[tuple[int, int]]:
    """Handles a message of each topic; returns each topic's pending entries of this and of another consumer."""

    def observe(name: str, /, **details: object) -> None:
        entries = details.get("entries")
        events[name] += entries if isinstance(entries, int) else 1

    async with open_broker("local://", observer=observe) as plain:
        for number in range(TOPICS):
            await plain.xadd(f"t{number}", {b"uuid": b"%d" % number, b"payload": b"x"})
        broker = Broker(FaultyTransport(plain.transport, acks.choose), plain.context)
        handled = 0
        all_handled = asyncio.Event()

        async def handle(message: Message) -> None:
            nonlocal handled
            if claimed is not None and message.topic == claimed and message.id is not None:
                await plain.xclaim(claimed, "g", "another", [message.id], min_idle_ms=0)
            handled += 1
            if handled == TOPICS:
                all_handled.set()
            await all_handled.wait()

        router = Router(broker, group_start="0", consumer="me")
        for number in range(TOPICS):
            router.add(handle, f"t{number}", group="g")
        async with asyncio.timeout(30), router:
            await eventually(lambda: events["messaging.acked"] + events["messaging.ack_refused"] >= TOPICS)
        pending = [await plain.xpending_range(f"t{number}", "g") for number in range(TOPICS)]
        return [(sum(e.consumer == "me" for e in p), sum(e.consumer == "another" for e in p)) for p in pending]


async def test_topics_share_a_script() -> None:
    acks, events = Acks(), Counter[str]()
    assert await handle_all(acks, events) == [(0, 0)] * TOPICS
    assert max(acks.streams) > 1
    assert events["messaging.acked"] == TOPICS


async def test_only_the_ack_of_a_claimed_entry_is_refused() -> None:
    acks, events = Acks(), Counter[str]()
    pending = await handle_all(acks, events, claimed="t7")
    assert pending == [(0, int(number == 7)) for number in range(TOPICS)]
    assert (events["messaging.acked"], events["messaging.ack_refused"]) == (TOPICS - 1, 1)


async def test_topics_are_acknowledged_one_by_one_if_their_script_is_not_permitted() -> None:
    acks, events = Acks(PermissionDenied("planted: NOPERM")), Counter[str]()
    assert await handle_all(acks, events) == [(0, 0)] * TOPICS
    assert events["messaging.acked"] == TOPICS


async def test_acknowledgements_are_repeated_after_an_outage() -> None:
    acks, events = Acks(BrokerUnavailable("planted: no server")), Counter[str]()
    assert await handle_all(acks, events) == [(0, 0)] * TOPICS
    assert events["messaging.settle_retried"] > 1
