"""Actions of operators on a Redis in use, or on the nodes of a cluster of three: pause it, fill it, disconnect all
clients, flush scripts, delete groups.

Publishers and subscribers continue through all of it. Each confirmed message is stored once, every stored message is
handled, and its output is stored. No component ends by itself, or receives an error that a retry would have resolved.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker.keys import slot_of
from millstream.errors import MillstreamError
from millstream.messaging import Backoff, Message, Publisher, Subscriber
from millstream.messaging.codecs import codec
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.wire.commands import Command
from support.proxied import Servers, each

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


class Operator:
    """Sends the same commands to each server, as an operator of a cluster does; ``broker`` reaches all of them."""

    def __init__(self, servers: Servers, broker: Broker, roots: list[Broker]) -> None:
        self.broker = broker
        self._roots = roots
        cluster = isinstance(servers, ClusterSetup)
        self.busiest = servers.owner(slot_of(TOPIC.encode())) if cluster else servers
        """The server with the topic. In a cluster only this one hangs; meanwhile the others consider it dead."""

    async def ask(self, *words: str) -> None:
        for root in self._roots:
            await root.transport.call(Command(tuple(word.encode() for word in words)))


Action = Callable[[Operator], Awaitable[None]]


async def hang(operator: Operator) -> None:
    operator.busiest.signal(signal.SIGSTOP)
    await asyncio.sleep(4)
    operator.busiest.signal(signal.SIGCONT)


async def fill(operator: Operator) -> None:
    for _ in range(3):
        await operator.ask("CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(1)
        await operator.ask("CONFIG", "SET", "maxmemory", "0")
        await asyncio.sleep(0.5)


async def disconnect_all_clients(operator: Operator) -> None:
    for _ in range(100):
        await operator.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await operator.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(random.random() * 0.05)


async def flush_scripts(operator: Operator) -> None:
    for _ in range(300):
        await operator.ask("SCRIPT", "FLUSH")
        await asyncio.sleep(0.004)


async def delete_groups(operator: Operator) -> None:
    for _ in range(5):
        await operator.broker.delete_group(TOPIC, GROUP)
        await asyncio.sleep(0.5)


async def pause(operator: Operator) -> None:
    for kind in ("WRITE", "ALL"):
        await operator.ask("CLIENT", "PAUSE", "3000", kind)
        await asyncio.sleep(4)


async def close_idle_connections(operator: Operator) -> None:
    await operator.ask("CONFIG", "SET", "timeout", "1")
    await asyncio.sleep(5)


async def limit_clients(operator: Operator) -> None:
    """Connections between a cluster's nodes are clients too: there the limit refuses all new clients."""
    await operator.ask("CONFIG", "SET", "maxclients", "3")
    await operator.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(2)
    await operator.ask("CONFIG", "SET", "maxclients", "1000")


async def ask_for_replicas(operator: Operator) -> None:
    await operator.ask("CONFIG", "SET", "min-replicas-to-write", "1")
    await asyncio.sleep(2)
    await operator.ask("CONFIG", "SET", "min-replicas-to-write", "0")


ACTIONS: tuple[Action, ...] = (
    delete_groups,
    disconnect_all_clients,
    hang,
    fill,
    flush_scripts,
    pause,
    close_idle_connections,
    limit_clients,
    ask_for_replicas,
)
"""All of them can be done to a cluster's nodes."""
COLUMNS = [
    *(("redis", action) for action in (ACTIONS if TRIALS > 2 else ACTIONS[:2])),
    ("cluster", disconnect_all_clients),
    *(
        pytest.param("cluster", action, marks=pytest.mark.at_length)
        for action in ACTIONS
        if action is not disconnect_all_clients
    ),
]


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
            asyncio.create_task(subscriber.consume(TOPIC, self._handle, publish_to=OUT))
            for subscriber in self.subscribers
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
            except Exception as error:  # any error is recorded, and fails the test
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


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Servers of this test only: no other test sees what is done to them."""
    with RedisProcess() if request.param == "redis" else ClusterSetup() as opened:
        yield opened


@pytest.mark.parametrize(
    ("servers", "action"),
    COLUMNS,
    indirect=["servers"],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_no_confirmed_write_is_lost_by_an_operator_action(servers: Servers, action: Action) -> None:
    async with AsyncExitStack() as brokers:

        async def reach(url: str, **options: Any) -> Broker:
            return await brokers.enter_async_context(open_broker(url, **options))

        root = await reach(servers.url, deadline_ms=60_000)
        operator = Operator(servers, root, [await reach(item.url, deadline_ms=60_000) for item in each(servers)])
        work = Work([await reach(servers.url) for _ in range(3)])
        await work.go_on()
        await action(operator)
        await work.go_on()
        await work.end(root)
        stored, put_out = await tokens_in(root, TOPIC), await tokens_in(root, OUT)
    print(
        f"{action.__name__}: confirmed {len(work.confirmed)}, handled again {sum(n > 1 for n in work.handled.values())}"
    )
    assert not work.errors
    assert set(work.confirmed) == stored.keys(), "what was confirmed is there, and nothing else"
    assert set(stored.values()) == {1}
    assert stored.keys() == work.handled.keys()
    assert stored.keys() == put_out.keys()
