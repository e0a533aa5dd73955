"""Event broadcasting: each subscribed service receives every event; instances of one service share the work.

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


def service(broker: Broker, name: str, instance: int, received: Counter[str]) -> EventBus:
    # "$": a new service starts with the next event.
    bus = EventBus(broker, service=name, group_start="$", consumer=f"{name}-{instance}", topic="example.{}".format)

    @bus.handler
    async def count(event: OrderPlaced) -> None:
        received[name] += 1
        received[f"{name}-{instance}"] += 1

    return bus


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream("example.OrderPlaced", companions=True)
        received: Counter[str] = Counter()
        async with (
            service(broker, "analytics", 1, received) as bus,
            service(broker, "notifications", 1, received),
            service(broker, "notifications", 2, received),
            service(broker, "audit", 1, received),
        ):
            for order in range(12):
                await bus.publish(OrderPlaced(order=order, total=9.5))
            services = ("analytics", "notifications", "audit")
            await eventually(lambda: all(received[name] == 12 for name in services), what="all services")
        for name in services:
            print(f"{name} received {received[name]} events")
        print(f"instances 1 and 2 of notifications: {received['notifications-1'] + received['notifications-2']}")
        await broker.delete_stream("example.OrderPlaced", companions=True)


asyncio.run(main())
