"""Cache invalidation: every instance keeps a cache, and every instance hears which entries have changed.

No group: each instance gets every message from its start on, and nothing is ever pending. What an instance missed
while it was away does not matter, because its cache was empty when it came.

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
        one, two = Instance(broker, prices), Instance(broker, prices)
        async with Publisher(broker) as publisher, one.router, two.router:
            print(f"both read the database: {one.read('book')}, {two.read('book')}")
            one.read("pen")

            prices["book"] = 12
            await publisher.publish(CHANGES, Message(b"book"))
            await eventually(lambda: "book" not in {**one.cache, **two.cache}, what="both hear of it")

            print(f"both have heard of the change: {one.read('book')}, {two.read('book')}")
            print(f"what did not change is still cached: {one.cache['pen']}")
        print(f"groups on the stream: {len(await broker.group_info(CHANGES))}")
        await broker.delete_stream(CHANGES, companions=True)


asyncio.run(main())
