"""What operators do to a Redis that is in use: hang it, fill it, cut everybody off, take scripts and groups away.

Publishers and subscribers work through all of it. What was confirmed is stored once, and every message that is stored
was handled, and its output stored; nobody ends by itself, and nobody is told an error that asking again could mend.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.errors import MillstreamError
from millstream.messaging import Backoff, Message, Publisher, Subscriber
from millstream.messaging.codecs import codec
from millstream.testing import RedisProcess, eventually
from millstream.wire.commands import Command

TRIALS = int(os.environ.get("TRIALS", "2"))
TOPIC, OUT, GROUP = "t", "out", "g"
QUICK: dict[str, Any] = {
    "group_start": "0",
    "block_ms": 300,
    "claim_interval_ms": 200,
    "claim_min_idle_ms": 2_000,
    "backoff": Backoff(initial_ms=5, max_ms=50),
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

Hands = Callable[[RedisProcess, Callable[..., Awaitable[Any]]], Awaitable[None]]


async def hang(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    server.signal(signal.SIGSTOP)
    await asyncio.sleep(4)
    server.signal(signal.SIGCONT)


async def fill(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    for _ in range(3):
        await ask("CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(1)
        await ask("CONFIG", "SET", "maxmemory", "0")
        await asyncio.sleep(0.5)


async def cut_everybody_off(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    for _ in range(100):
        await ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await ask("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(random.random() * 0.05)


async def take_scripts_away(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    for _ in range(300):
        await ask("SCRIPT", "FLUSH")
        await asyncio.sleep(0.004)


async def take_groups_away(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    for _ in range(5):
        await ask("XGROUP", "DESTROY", TOPIC, GROUP)
        await asyncio.sleep(0.5)


async def pause(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    for kind in ("WRITE", "ALL"):
        await ask("CLIENT", "PAUSE", "3000", kind)
        await asyncio.sleep(4)


async def close_idle_connections(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    await ask("CONFIG", "SET", "timeout", "1")
    await asyncio.sleep(5)


async def let_few_in(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    await ask("CONFIG", "SET", "maxclients", "3")
    await ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(2)
    await ask("CONFIG", "SET", "maxclients", "1000")


async def ask_for_replicas(server: RedisProcess, ask: Callable[..., Awaitable[Any]]) -> None:
    await ask("CONFIG", "SET", "min-replicas-to-write", "1")
    await asyncio.sleep(2)
    await ask("CONFIG", "SET", "min-replicas-to-write", "0")


HANDS: tuple[Hands, ...] = (
    take_groups_away,
    cut_everybody_off,
    hang,
    fill,
    take_scripts_away,
    pause,
    close_idle_connections,
    let_few_in,
    ask_for_replicas,
)


class Work:
    """Publishers and two subscribers, each with connections of its own."""

    def __init__(self, brokers: list[Broker]) -> None:
        self.confirmed: list[bytes] = []
        self.handled: Counter[bytes] = Counter()
        self.errors: list[Exception] = []
        self._stop = False
        self._number = 0
        self.publisher = Publisher(brokers[0], retry_ms=60_000)
        self.subscribers = [
            Subscriber(broker, group=GROUP, consumer=f"c{number}", **QUICK) for number, broker in enumerate(brokers[1:])
        ]
        self.reading = [
            asyncio.create_task(one.consume(TOPIC, self._handle, publish_to=OUT)) for one in self.subscribers
        ]
        self.writing = [asyncio.create_task(self._write()) for _ in range(4)]

    async def _handle(self, message: Message) -> list[Message]:
        self.handled[message.payload] += 1
        await asyncio.sleep(random.random() * 0.005)
        return [Message(message.payload)]

    async def _write(self) -> None:
        while not self._stop:
            tokens = [b"%d" % (self._number + at) for at in range(10)]
            self._number += 10
            try:
                await self.publisher.publish(TOPIC, *map(Message, tokens))
            except Exception as error:  # whatever it is, it is a finding
                self.errors.append(error)
            else:
                self.confirmed += tokens
            await asyncio.sleep(0.01)

    async def go_on(self) -> None:
        before = len(self.confirmed)
        await eventually(lambda: len(self.confirmed) > before + 100, what="publishers to go on", timeout_s=60)
        ended = [task for task in self.reading if task.done()]
        assert not ended, "a subscriber ended by itself"

    async def end(self, broker: Broker) -> None:
        self._stop = True
        await asyncio.gather(*self.writing)
        await self.publisher.close()

        async def settled() -> bool:
            try:
                (group,) = await broker.group_info(TOPIC)
                (last,) = await broker.xrevrange(TOPIC, count=1)
            except (MillstreamError, ValueError):
                return False
            return group.pending == 0 and group.last_delivered >= last.id

        await eventually(settled, what="everything to be settled", timeout_s=60)
        for subscriber in self.subscribers:
            await subscriber.close()
        await asyncio.gather(*self.reading)


async def tokens_in(broker: Broker, stream: str) -> Counter[bytes]:
    return Counter(codec("flat").decode(entry.fields).payload for entry in await broker.xrange(stream))


@pytest.mark.parametrize("hand", HANDS if TRIALS > 2 else HANDS[:2], ids=lambda hand: hand.__name__)
async def test_whatever_an_operator_does_nothing_confirmed_is_lost(hand: Hands) -> None:
    with RedisProcess() as server:
        async with (
            open_broker(server.url, deadline_ms=60_000) as root,
            open_broker(server.url) as one,
            open_broker(server.url) as two,
            open_broker(server.url) as three,
        ):

            async def ask(*words: str) -> Any:
                return await root.link.call(Command(tuple(word.encode() for word in words)))

            work = Work([one, two, three])
            await work.go_on()
            await hand(server, ask)
            await work.go_on()
            await work.end(root)
            stored, put_out = await tokens_in(root, TOPIC), await tokens_in(root, OUT)
    print(
        f"{hand.__name__}: confirmed {len(work.confirmed)}, handled again {sum(n > 1 for n in work.handled.values())}"
    )
    assert not work.errors
    assert set(work.confirmed) == stored.keys(), "what was confirmed is there, and nothing else"
    assert set(stored.values()) == {1}
    assert stored.keys() == work.handled.keys()
    assert stored.keys() == put_out.keys()
