"""Event broadcasting: one event, and every service that cares gets it; instances of a service share the work.

python examples/event_broadcasting.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os
from collections import Counter

from pydantic import BaseModel

from millstream import Broker, open_broker
from millstream.cqrs import EventBus
from millstream.testing import eventually


class OrderPlaced(BaseModel):
    order: int
    total: float


def service(broker: Broker, name: str, instance: int, heard: Counter[str]) -> EventBus:
    # "$": a service that is new begins with what happens from now on.
    bus = EventBus(broker, service=name, group_start="$", consumer=f"{name}-{instance}", topic="example.{}".format)

    @bus.handler
    async def count(event: OrderPlaced) -> None:
        heard[name] += 1
        heard[f"{name}-{instance}"] += 1

    return bus


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream("example.OrderPlaced", companions=True)
        heard: Counter[str] = Counter()
        async with (
            service(broker, "analytics", 1, heard) as bus,
            service(broker, "notifications", 1, heard),
            service(broker, "notifications", 2, heard),
            service(broker, "audit", 1, heard),
        ):
            for order in range(12):
                await bus.publish(OrderPlaced(order=order, total=9.5))
            services = ("analytics", "notifications", "audit")
            await eventually(lambda: all(heard[name] == 12 for name in services), what="all services")
        for name in services:
            print(f"{name} heard {heard[name]} events")
        print(f"its two instances together: {heard['notifications-1'] + heard['notifications-2']}")
        await broker.delete_stream("example.OrderPlaced", companions=True)


asyncio.run(main())
