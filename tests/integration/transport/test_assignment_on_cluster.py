"""Members on a real cluster: data streams in many slots, one round trip per node."""

from __future__ import annotations

import asyncio
from collections import Counter

from millstream import open_broker
from millstream.assignment import AssignmentClient
from millstream.assignment.membership import Settings
from millstream.broker.keys import slot_of
from millstream.testing import ClusterSetup, eventually
from millstream.testing.topologies import ask
from support.dead_members import crash, lease_runs_out

SETTINGS = Settings(lease_ms=60_000, renew_interval_ms=300, sweep_interval_ms=50)


async def test_streams_in_many_slots_are_placed_fenced_and_taken_over(cluster: ClusterSetup) -> None:
    async with open_broker(cluster.url) as broker:
        a, b = (AssignmentClient(broker, "clustered", member=name, settings=SETTINGS) for name in "ab")

        async def drain(client: AssignmentClient) -> None:
            async for _ in client.start():
                pass

        tasks = [asyncio.create_task(drain(client)) for client in (a, b)]
        for n in range(40):
            await a.announce(f"cluster-data-{n}")
        await eventually(lambda: len(a.owned) == len(b.owned) == 20, what="an even spread", timeout_s=60)
        stream, token = next(iter(a.owned.items()))
        await broker.fenced(token).xadd(stream, {"n": 1})
        await crash(a)
        await lease_runs_out(a)
        await eventually(lambda: len(b.owned) == 40, what="the dead member's streams to be taken", timeout_s=60)
        for name in list(b.owned):
            await b.finish(name)
        assert await broker.xlen("clustered-input") == 0
        await b.close()
        await a.close()
        await asyncio.wait(tasks, timeout=60)


async def test_member_keeps_its_streams_while_a_slot_moves(resharded_cluster: ClusterSetup) -> None:
    """A slot is half moved to a node without our scripts: the member keeps renewing and loses none of its streams."""
    cluster = resharded_cluster
    event_counts: Counter[str] = Counter()
    async with open_broker(cluster.url) as broker:
        client = AssignmentClient(
            broker, "moving", member="a", settings=SETTINGS, observer=lambda name, /, **_: event_counts.update([name])
        )

        async def drain() -> None:
            async for _ in client.start():
                pass

        task = asyncio.create_task(drain())
        for n in range(20):
            await client.announce(f"moving-data-{n}")
        await eventually(lambda: len(client.owned) == 20, what="all are placed", timeout_s=60)
        tokens = client.owned
        slot = slot_of(b"moving-new")
        source = cluster.owner(slot)
        target = next(node for node in cluster.nodes if node is not source)
        ask(target, "SCRIPT", "FLUSH")
        cluster.begin_move(slot, target)
        await client.announce("moving-new")
        previous = event_counts["assignment.renewed"]
        await eventually(lambda: event_counts["assignment.renewed"] > previous + 3, what="renewals go on", timeout_s=60)
        assert {name: client.owned[name] for name in tokens} == tokens
        assert client.ready
        cluster.end_move(slot, target)
        await eventually(lambda: "moving-new" in client.owned, what="what was on its way is taken", timeout_s=60)
        assert event_counts["assignment.disowned"] == 0
        await client.close()
        await asyncio.wait([task], timeout=60)
