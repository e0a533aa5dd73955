"""Storms: subscribers whose connections to the broker break at any moment, thousands of outages in virtual time.

An outage loses the replies of all requests in progress, and refuses further ones until it ends, which is before or
after other consumers claim entries. After the last one, nothing is pending, every message was handled, and every
in-flight table is empty. A storm has a seed, and runs in the same way each time.

On a simulated Cluster of three an outage affects one node or all, and there are more topics than waiting slots: the
other topics are polled after reports of writes, of which some are lost. Sets of many topics are iterated in a different
order each time, so such a storm varies.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from chaos.crew import settled
from millstream import Broker, open_broker
from millstream.broker import Transport
from millstream.errors import BrokerUnavailable
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.messaging.consumer.in_flight import InFlight
from millstream.messaging.consumer.subscription import Subscription
from millstream.model import SystemClock
from millstream.wire import Args, Batch, Command, return_unchanged
from support.simulated_cluster import NODES, ClusterTransport, SimulatedKeyWatch, node_of
from support.virtual_time import run_in_virtual_time

STORMS = int(os.environ.get("TRIALS", "2"))
MEMBERS = 3
OUTAGES = 15
CLAIM_MS = 6_000
ON_A_CLUSTER = 20
"""Topics, each in a slot of its own."""
LOST_REPORTS = 0.2
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "outputs": {"publish_to": "out"}, "in order": {"ordered_by_key": True}}


class VirtualClock(SystemClock):
    """The broker's clock, which advances with the event loop's."""

    def now_ms(self) -> int:
        return 1_700_000_000_000 + self.monotonic_ms()


class FaultyNetwork:
    """A member's network to the broker, or to each node of a cluster: requests and replies take a moment each, and an
    outage loses both."""

    def __init__(self, transport: Transport, chance: random.Random, nodes: int) -> None:
        self._transport = transport
        self._chance = chance
        self._nodes = nodes
        self._cut = [asyncio.Event() for _ in range(nodes)]
        self._away = [False] * nodes
        self.features = transport.features
        self.now: Callable[[Args], Any] | None = None

    def cut(self, nodes: Iterable[int], *, away: bool) -> None:
        for node in nodes:
            self._away[node] = away
            self._cut[node].set()
            self._cut[node] = asyncio.Event()

    async def call(self, command: Command) -> Any:
        return await self._exchange(self._node_of(command.key), lambda: self._transport.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        if batch.keys is None:
            replies: list[Any] = await self._exchange(
                self._node_of(batch.key), lambda: self._transport.call_many(batch)
            )
            return replies
        return batch.reading(await self._ask_each_node(batch, batch.keys))

    async def _ask_each_node(self, batch: Batch, keys: Sequence[bytes]) -> list[Any]:
        """As the transport to Redis does it: each command without a reply from its node gets an error."""
        replies: list[Any] = [None] * len(keys)
        for node in range(self._nodes):
            share = [number for number, key in enumerate(keys) if self._node_of(key) == node]
            part = batch._replace(
                commands=[batch.commands[number] for number in share],
                keys=[keys[number] for number in share],
                reading=return_unchanged,
            )
            if not share:
                continue
            answers: list[Any]
            try:
                answers = await self._exchange(node, partial(self._transport.call_many, part))
            except BrokerUnavailable as error:
                answers = [error] * len(share)
            for number, answer in zip(share, answers, strict=True):
                replies[number] = answer
        if replies and all(isinstance(reply, BrokerUnavailable) for reply in replies):
            raise next((reply for reply in replies if reply.may_have_been_applied), replies[0])
        return replies

    def _node_of(self, key: bytes | None) -> int:
        return node_of(key) if self._nodes > 1 else 0

    async def _exchange(self, node: int, ask: Callable[[], Awaitable[Any]]) -> Any:
        cut = self._cut[node]
        await asyncio.sleep(self._chance.random() * 0.02)
        if self._away[node]:
            raise BrokerUnavailable("planted: refused")
        if cut.is_set() and self._chance.random() < 0.5:
            raise BrokerUnavailable("planted: lost on its way", may_have_been_applied=True)
        asked = asyncio.ensure_future(ask())
        broken = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait([asked, broken], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await asyncio.sleep(self._chance.random() * 0.02)
            if cut.is_set():
                raise BrokerUnavailable("planted: no answer", may_have_been_applied=True)
            return asked.result()
        finally:
            broken.cancel()
            asked.cancel()
            await asyncio.gather(asked, broken, return_exceptions=True)

    def listen(self, patterns: Any) -> Any:
        return self._transport.listen(patterns)

    async def close(self) -> None:
        pass


class Storm:
    def __init__(self, seed: int, kind: str, *, cluster: bool) -> None:
        self.chance = random.Random(seed)
        self.options = dict(KINDS[kind])
        self.publish_to = self.options.pop("publish_to", None)
        self.cluster = cluster
        self.nodes = range(NODES if cluster else 1)
        self.topics = [f"orders-{number}" for number in range(ON_A_CLUSTER if cluster else 1)]
        self.handled: Counter[bytes] = Counter()
        self.events: Counter[str] = Counter()
        self.transports: list[FaultyNetwork] = []

    async def run(self) -> None:
        sent: set[bytes] = set()
        async with open_broker("local://", clock=VirtualClock(), max_stream_len=None) as broker:
            if self.cluster:
                broker.transport = link = ClusterTransport(broker.transport)
                broker.context.cluster, broker.context.node_of = True, node_of
                broker.context.watch_keys = partial(SimulatedKeyWatch, link, self.chance, lost=LOST_REPORTS)
            members = [self._member(broker, f"member-{number}") for number in range(MEMBERS)]
            at_work = [
                asyncio.create_task(member.consume(topic, self._handle, publish_to=self.publish_to))
                for member in members
                for topic in self.topics
            ]
            async with Publisher(broker) as publisher:
                for _ in range(OUTAGES):
                    for topic in self.topics:
                        batch = [b"%d" % (len(sent) + n) for n in range(self.chance.randrange(40 // len(self.topics)))]
                        await publisher.publish(topic, *(Message(item, {"key": f"k{item[-1]}"}) for item in batch))
                        sent.update(batch)
                    await self._outage()
            for transport in self.transports:
                transport.cut(self.nodes, away=False)
            for _ in range(60):  # each retry, rest and takeover takes a few of these at most
                await asyncio.sleep(CLAIM_MS / 1000)
                remaining = [topic for topic in self.topics if not await settled(broker, topic)]
                held = [sorted(map(str, table.ids())) for member in members for table in tables_of(member)]
                if not remaining and not any(held):
                    break
            for member in members:
                await member.close()
            await asyncio.gather(*at_work)
        assert not remaining, "not everything was read and acknowledged"
        assert held == [[]] * MEMBERS * len(self.topics)
        assert set(self.handled) == sent
        assert not self.events["messaging.consumer_shared"]
        assert not self.events["messaging.part_restarted"]

    def _member(self, broker: Broker, name: str) -> Subscriber:
        transport = FaultyNetwork(broker.transport, self.chance, len(self.nodes))
        self.transports.append(transport)
        context = replace(broker.context, observer=self._observe)
        return Subscriber(
            Broker(transport, context),
            group="g",
            consumer=name,
            group_start="0",
            claim_min_idle_ms=CLAIM_MS,
            claim_interval_ms=500,
            max_deliveries=1000,
            **self.options,
        )

    def _observe(self, name: str, /, **_: Any) -> None:
        self.events[name] += 1

    async def _handle(self, message: Message) -> Message | None:
        self.handled[message.payload] += 1
        await asyncio.sleep(self.chance.choice([0, 0.01, 0.3, 8.0]))
        luck = self.chance.random()
        if luck < 0.05:
            raise ValueError("a handler's own")
        if luck < 0.1:
            raise RetryLater(delay_ms=self.chance.choice([1, 500, 9_000]), charged=luck < 0.07)
        return Message(message.payload) if self.publish_to else None

    async def _outage(self) -> None:
        batch = self.transports if self.chance.random() < 0.6 else [self.chance.choice(self.transports)]
        nodes = self.nodes if self.chance.random() < 0.5 else [self.chance.choice(self.nodes)]
        for _ in range(self.chance.randrange(1, 4)):
            for transport in batch:
                transport.cut(nodes, away=True)
            await asyncio.sleep(self.chance.choice([0, 0.1, 1, 1.2 * CLAIM_MS / 1000, 2 * CLAIM_MS / 1000]))
            for transport in batch:
                transport.cut(nodes, away=False)
            await asyncio.sleep(self.chance.choice([0.03, 0.1, 0.5]) * self.chance.random())
        await asyncio.sleep(self.chance.choice([0, 0.5, 3, CLAIM_MS / 1000]))


def tables_of(member: Subscriber) -> list[InFlight]:
    return [item._state.in_flight for item in member._open if isinstance(item, Subscription)]


ONCE_MORE = pytest.mark.at_length
COLUMNS = [
    *(pytest.param(number, kind, False) for number in range(STORMS) for kind in KINDS),
    # In `make test` the variants whose outputs are in another slot than the input.
    *(
        pytest.param(number, kind, True, marks=ONCE_MORE if number or kind != "outputs" else ())
        for number in range(STORMS)
        for kind in KINDS
    ),
]


@pytest.mark.chaos
@pytest.mark.parametrize(("number", "kind", "cluster"), COLUMNS)
def test_nothing_stays_in_flight_or_pending_after_a_storm(number: int, kind: str, cluster: bool) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**9)
    print(f"SEED={seed}")
    random.seed(seed)  # pauses are spread by the common source
    run_in_virtual_time(Storm(seed, kind, cluster=cluster).run())
