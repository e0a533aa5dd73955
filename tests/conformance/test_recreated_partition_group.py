"""If the consumer group of a partition is deleted or recreated, messages are duplicated and never lost."""

from __future__ import annotations

import asyncio

import pytest

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.assignment import PartitionedSubscriber, Settings
from millstream.testing import eventually

STEADY = Settings(lease_ms=60_000, renew_interval_ms=250, sweep_interval_ms=50, go_locks=False)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", STEADY)


@pytest.mark.parametrize("damage", ["recreated", "consumer deleted", "destroyed"])
async def test_owner_that_holds_messages_restores_the_group(damage: str, broker_url: str) -> None:
    started: list[bytes] = []
    handled: set[bytes] = set()
    broken = asyncio.Event()
    async with open_broker(broker_url) as broker, Publisher(broker, partitions={"orders": 1}) as publisher:
        router = Router(broker, group_start="$", block_ms=200, claim_min_idle_ms=600, claim_interval_ms=100)

        @router.on("orders", group="g", partitions=1, max_in_flight=4, max_deliveries=50)
        async def handle(message: Message) -> None:
            started.append(message.payload)
            if not broken.is_set():
                await broken.wait()
                raise RuntimeError("the first attempts fail, so the messages must be delivered again")
            handled.add(message.payload)

        async with router:
            # A router is ready before it owns the partition, whose group begins at the end.
            await eventually(lambda: broker.exists("orders.p0"), timeout_s=30)
            await publisher.publish("orders", *(Message(b"%d" % n, {"key": f"k{n}"}) for n in range(8)))
            await eventually(lambda: len(started) == 4, timeout_s=30)
            if damage == "consumer deleted":
                [consumer] = await broker.consumer_info("orders.p0", "g")
                await broker.delete_consumer("orders.p0", "g", consumer.name, discard=True)
            else:
                await broker.delete_group("orders.p0", "g")
                if damage == "recreated":
                    await broker.create_group("orders.p0", "g", start="$")
            broken.set()
            await eventually(lambda: len(handled) == 8, what="every message to be handled", timeout_s=30)


async def test_new_owner_reads_everything_if_the_group_was_deleted_with_its_dead_owner(
    broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Settings(lease_ms=1_000, renew_interval_ms=250, sweep_interval_ms=50, go_locks=False)
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", quick)
    handled: set[bytes] = set()
    started = asyncio.Event()

    def make(broker: Broker, *, hangs: bool) -> Router:
        router = Router(broker, group_start="$", block_ms=200, close_timeout_ms=100)

        @router.on("orders", group="g", partitions=1, max_in_flight=2)
        async def handle(message: Message) -> None:
            started.set()
            if hangs:
                await asyncio.sleep(60)
            handled.add(message.payload)

        return router

    async with open_broker(broker_url) as broker, Publisher(broker, partitions={"orders": 1}) as publisher:
        doomed = open_broker(broker_url)
        dead = make(doomed, hangs=True)
        running = asyncio.create_task(dead.run(handle_signals=False))
        await eventually(lambda: dead.ready, timeout_s=30)
        await eventually(lambda: bool(dead._subscribers[0][1].streams), timeout_s=30)  # type: ignore[attr-defined]
        await eventually(lambda: broker.exists("orders.p0"), timeout_s=30)
        await publisher.publish("orders", *(Message(b"%d" % n, {"key": f"k{n}"}) for n in range(6)))
        await started.wait()
        await doomed.close()  # as if the process had died: it returns no entries
        await broker.delete_group("orders.p0", "g")
        async with make(broker, hangs=False):
            await eventually(lambda: len(handled) == 6, what="every message to be handled", timeout_s=30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
