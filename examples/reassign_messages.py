"""Reassigning messages: a consumer takes work and dies; another one finds it, takes it over and finishes it.

The first part does it by hand with the broker's operations, to show what happens. The second part is what services
do: a subscriber that takes over what others have left, by itself.

python examples/reassign_messages.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os

from millstream import Broker, open_broker
from millstream.messaging import Message, Router
from millstream.testing import eventually

TASKS = "example.reassign"


async def by_hand(broker: Broker) -> None:
    await broker.xreadgroup(TASKS, "workers", "worker-1", count=2)
    print("worker-1 took 2 entries, and died")

    waiting = await broker.xpending_range(TASKS, "workers")
    print(f"pending: {[(entry.consumer, entry.times_delivered) for entry in waiting]}")

    # min_idle_ms protects consumers that are alive: only what rested for so long is taken. Here nobody else is.
    claimed = await broker.xautoclaim(TASKS, "workers", "worker-2", min_idle_ms=0)
    print(f"worker-2 claimed {len(claimed.deliveries)}: {[each.fields for each in claimed.deliveries]}")
    waiting = await broker.xpending_range(TASKS, "workers")
    print(f"pending: {[(entry.consumer, entry.times_delivered) for entry in waiting]}")

    await broker.xack(TASKS, "workers", [each.id for each in claimed.deliveries])
    # Deleting a consumer would throw its pending entries away; the broker refuses that. Now it has none.
    await broker.delete_consumer(TASKS, "workers", "worker-1")
    print(f"pending: {(await broker.xpending(TASKS, 'workers')).count}")


async def by_itself(broker: Broker) -> None:
    for number in (3, 4):
        await broker.xadd(TASKS, {"task": number})
    await broker.xreadgroup(TASKS, "workers", "worker-1", count=2)
    print("worker-1 took 2 more entries, and died")
    done: list[str] = []
    router = Router(broker)

    @router.on(TASKS, group="workers", group_start="0", consumer="worker-3", claim_min_idle_ms=50, claim_interval_ms=10)
    async def work(message: Message) -> None:
        done.append(message.metadata["task"])

    async with router:
        await eventually(lambda: len(done) == 2, what="somebody else does them")
    print(f"worker-3 did tasks {', '.join(sorted(done))}; pending: {(await broker.xpending(TASKS, 'workers')).count}")


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(TASKS, companions=True)
        await broker.create_group(TASKS, "workers", start="0")
        for number in (1, 2):
            await broker.xadd(TASKS, {"task": number})
        await by_hand(broker)
        await by_itself(broker)
        await broker.delete_stream(TASKS, companions=True)


asyncio.run(main())
