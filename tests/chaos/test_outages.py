"""Members lose their server for longer than the claim time, and lose it again while they recover.

So replies to all kinds of requests are lost: reads, claims, counts, heartbeats, outcomes. In the end nothing may
stay pending or in flight, and every member must still be able to claim entries.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from chaos.crew import settled
from millstream import Router, open_broker
from millstream.messaging import Message, Publisher
from millstream.testing import CuttingProxy, eventually
from support.proxied import Servers, before, url_through

TRIALS = int(os.environ.get("TRIALS", "1"))
STRIKES = 12 if TRIALS > 1 else 4
MEMBERS = 3
CLAIM_MS = 600
"""After this time others claim entries: an outage is shorter, or twice as long."""
KINDS: dict[str, dict[str, Any]] = {
    "outputs": {"publish_to": "out"},
    "acknowledged": {},
    "in order": {"ordered_by_key": True},
}
COLUMNS = [
    *(("redis", kind) for kind in KINDS),
    ("cluster", "outputs"),  # streams in another slot than those of the input
    *(pytest.param("cluster", kind, marks=pytest.mark.at_length) for kind in ("acknowledged", "in order")),
]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


class Members:
    """Routers in this process, each with a proxy of its own to the server; on a cluster, to each of its nodes."""

    def __init__(self, kind: str, chance: random.Random) -> None:
        self.handled: Counter[bytes] = Counter()
        self.events: Counter[str] = Counter()
        self._options = KINDS[kind]
        self._chance = chance
        self._ways: list[list[CuttingProxy]] = []
        self._members = AsyncExitStack()

    async def start(self, servers: Servers) -> None:
        for _ in range(MEMBERS):
            way = before(servers, CuttingProxy)
            for proxy in way:
                await self._members.enter_async_context(proxy)
            self._ways.append(way)
            url = url_through(servers, way)
            broker = await self._members.enter_async_context(
                open_broker(url, deadline_ms=CLAIM_MS // 2, observer=self._observe)
            )
            router = Router(broker, block_ms=100, count=20, claim_min_idle_ms=CLAIM_MS, claim_interval_ms=50)
            router.on("orders", group="g", group_start="0", **self._options)(self._handle)
            await self._members.enter_async_context(router)

    def _observe(self, name: str, /, **_: Any) -> None:
        self.events[name] += 1

    async def _handle(self, message: Message) -> Message | None:
        self.handled[message.payload] += 1
        await asyncio.sleep(0)
        return Message(message.payload) if "publish_to" in self._options else None

    async def strike(self) -> None:
        """Disconnects all members, or one of them, for a while, and mostly once more while they recover; on a cluster
        from all nodes, or from one."""
        ways = self._ways if self._chance.random() < 0.7 else [self._chance.choice(self._ways)]
        nodes = range(len(self._ways[0]))
        cut = nodes if self._chance.random() < 0.5 else [self._chance.choice(nodes)]
        batch = [way[node] for way in ways for node in cut]
        while True:
            for proxy in batch:
                proxy.closed = True
                proxy.cut_all()
            await asyncio.sleep(self._chance.choice([0, 0.3, 1.2 * CLAIM_MS / 1000, 2 * CLAIM_MS / 1000]))
            for proxy in batch:
                proxy.closed = False
            if self._chance.random() < 0.4:
                break
            await asyncio.sleep(self._chance.random() * 0.15)
        await asyncio.sleep(self._chance.random() * 0.4)

    async def dismiss(self) -> None:
        await self._members.aclose()


@pytest.mark.parametrize(("servers", "kind"), COLUMNS, indirect=["servers"])
@pytest.mark.parametrize("trial", range(TRIALS))
async def test_nothing_stays_pending_or_in_flight_after_outages(trial: int, servers: Servers, kind: str) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6)
    print(f"SEED={seed}")
    chance = random.Random(seed)
    members = Members(kind, chance)
    async with open_broker(servers.url) as broker, Publisher(broker) as publisher:
        sent: list[bytes] = []

        async def publish() -> None:
            while True:
                batch = [b"%d" % (len(sent) + n) for n in range(chance.randrange(1, 40))]
                await publisher.publish("orders", *(Message(item, {"key": f"k{item[-1]}"}) for item in batch))
                sent.extend(batch)
                await asyncio.sleep(chance.random() * 0.03)

        await members.start(servers)
        try:
            publishing = asyncio.create_task(publish())
            for _ in range(STRIKES):
                await members.strike()
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await eventually(lambda: settled(broker, "orders"), what="nothing to be left", timeout_s=60)
        finally:
            await members.dismiss()
        stored = {entry.fields[b"payload"] for entry in await broker.xrange("orders")}
        put_out = {entry.fields[b"payload"] for entry in await broker.xrange("out")}
    assert stored >= set(sent)
    assert set(members.handled) == stored, "every one, and nothing else"
    assert put_out == (stored if kind == "outputs" else set())
    assert members.events["messaging.consumer_shared"] == 0, "each has a name of its own"
