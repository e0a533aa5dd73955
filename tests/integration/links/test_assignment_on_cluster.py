"""Members over a real cluster: data streams in many slots, one round trip a node."""

from __future__ import annotations

import asyncio

from millstream import open_broker
from millstream.assignment import AssignmentClient
from millstream.assignment.settings import Settings
from millstream.testing import ClusterSetup, eventually

SETTINGS = Settings(lease_ms=3_000, renew_interval_ms=300, sweep_interval_ms=50)


async def test_streams_in_many_slots_are_placed_guarded_and_taken_over(cluster: ClusterSetup) -> None:
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
        await a.guarded(token).xadd(stream, {"n": 1})
        for task in a._tasks:
            task.cancel()
        await eventually(lambda: len(b.owned) == 40, what="the dead member's streams to be taken", timeout_s=60)
        for name in list(b.owned):
            await b.finish(name)
        assert await broker.xlen("clustered-input") == 0
        await b.close()
        await a.close()
        await asyncio.wait(tasks, timeout=60)
