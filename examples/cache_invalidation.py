"""Cache invalidation: every instance keeps a cache, and every instance receives the names of changed entries.

No group: each instance receives every message from its start on, and nothing is pending. Messages that an instance
missed while it was down do not matter, because its cache is empty when it starts.

python examples/cache_invalidation.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os

from millstream import Broker, open_broker
from millstream.messaging import Message, Publisher, Router
from millstream.testing import eventually

CHANGES = "example.changes"


class Instance:
    """One process of a service, with a cache in its memory."""

    def __init__(self, broker: Broker, database: dict[str, int]) -> None:
        self._database = database
        self.cache: dict[str, int] = {}
        self.router = Router(broker)
        self.router.add(self.invalidate, CHANGES)

    def read(self, product: str) -> int:
        if product not in self.cache:
            self.cache[product] = self._database[product]
        return self.cache[product]

    async def invalidate(self, message: Message) -> None:
        self.cache.pop(message.payload.decode(), None)


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(CHANGES, companions=True)
        prices = {"book": 10, "pen": 2}
        first, second = Instance(broker, prices), Instance(broker, prices)
        async with Publisher(broker) as publisher, first.router, second.router:
            print(f"both read the database: {first.read('book')}, {second.read('book')}")
            first.read("pen")

            prices["book"] = 12
            await publisher.publish(CHANGES, Message(b"book"))
            await eventually(lambda: "book" not in {**first.cache, **second.cache}, what="both invalidations")

            print(f"both read the new price: {first.read('book')}, {second.read('book')}")
            print(f"the unchanged price is still cached: {first.cache['pen']}")
        print(f"groups on the stream: {len(await broker.group_info(CHANGES))}")
        await broker.delete_stream(CHANGES, companions=True)


asyncio.run(main())
