"""Entries that a consumer recovers keep the order of their keys, whichever of them were idle for longer."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from millstream import open_broker
from millstream.messaging import Message, Publisher, Subscriber
from millstream.wire.commands import Command
from support.virtual_time import run_in_virtual_time


@pytest.mark.parametrize("max_in_flight", [10, 100])
def test_later_entries_that_are_idle_do_not_overtake_earlier_ones_of_their_keys(max_in_flight: int) -> None:
    handled: dict[str | None, list[int]] = defaultdict(list)
    ended: list[int] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        handled[message.key].append(int(message.payload))
        ended.append(1)

    async def main() -> None:
        async with open_broker("local://") as broker, Publisher(broker) as publisher:
            messages = [Message(b"%d" % n, {"key": f"k{n % 6}"}) for n in range(300)]
            await publisher.publish("orders", *messages)
            await broker.create_group("orders", "g", start="0")
            ids = [entry.id for entry in await broker.xreadgroup("orders", "g", "me", count=300)]
            idle = [str(entry_id).encode() for entry_id in ids[200:]]
            words = (b"XCLAIM", b"orders", b"g", b"me", b"0", *idle, b"IDLE", b"200000", b"JUSTID")
            await broker.transport.call(Command(words, b"orders"))
            subscriber = Subscriber(
                broker, group="g", consumer="me", group_start="0", ordered_by_key=True, max_in_flight=max_in_flight
            )
            task = asyncio.create_task(subscriber.consume("orders", handle))
            async with asyncio.timeout(600):
                while len(ended) < 300:
                    await asyncio.sleep(0.1)
            await subscriber.close()
            await task

    run_in_virtual_time(main())
    assert all(numbers == sorted(numbers) for numbers in handled.values())
    assert len(handled) == 6
