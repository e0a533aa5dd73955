"""Reassigning messages: a consumer crashes with pending entries; another consumer claims and finishes them.

The first part claims them with the broker's operations, to show what happens. The second part uses a router, which
claims abandoned entries automatically.

python examples/reassign_messages.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os

from millstream import Broker, open_broker
from millstream.messaging import Message, Router
from millstream.testing import eventually

TASKS = "example.reassign"


async def claim_with_operations(broker: Broker) -> None:
    await broker.xreadgroup(TASKS, "workers", "worker-1", count=2)
    print("worker-1 received 2 entries and crashed")

    waiting = await broker.xpending_range(TASKS, "workers")
    print(f"pending: {[(entry.consumer, entry.times_delivered) for entry in waiting]}")

    # min_idle_ms protects live consumers: only entries that are idle for so long are claimed. Here no other one lives.
    claimed = await broker.xautoclaim(TASKS, "workers", "worker-2", min_idle_ms=0)
    print(f"worker-2 claimed {len(claimed.deliveries)}: {[delivery.fields for delivery in claimed.deliveries]}")
    waiting = await broker.xpending_range(TASKS, "workers")
    print(f"pending: {[(entry.consumer, entry.times_delivered) for entry in waiting]}")

    await broker.xack(TASKS, "workers", [delivery.id for delivery in claimed.deliveries])
    # XGROUP DELCONSUMER discards pending entries, so delete_consumer refuses a consumer that has any.
    await broker.delete_consumer(TASKS, "workers", "worker-1")
    print(f"pending: {(await broker.xpending(TASKS, 'workers')).count}")


async def claim_with_router(broker: Broker) -> None:
    for number in (3, 4):
        await broker.xadd(TASKS, {"task": number})
    await broker.xreadgroup(TASKS, "workers", "worker-1", count=2)
    print("worker-1 received 2 more entries and crashed")
    done: list[str] = []
    router = Router(broker)

    @router.on(TASKS, group="workers", group_start="0", consumer="worker-3", claim_min_idle_ms=50, claim_interval_ms=10)
    async def work(message: Message) -> None:
        done.append(message.metadata["task"])

    async with router:
        await eventually(lambda: len(done) == 2, what="worker-3 to finish both tasks")
    print(f"worker-3 did tasks {', '.join(sorted(done))}; pending: {(await broker.xpending(TASKS, 'workers')).count}")


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(TASKS, companions=True)
        await broker.create_group(TASKS, "workers", start="0")
        for number in (1, 2):
            await broker.xadd(TASKS, {"task": number})
        await claim_with_operations(broker)
        await claim_with_router(broker)
        await broker.delete_stream(TASKS, companions=True)


asyncio.run(main())
