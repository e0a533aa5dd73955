"""A worker process for the tests of ``doctor``: takes one message, and never finishes it."""

from __future__ import annotations

import asyncio
import sys

from millstream import Message, Subscriber, open_broker


async def main(url: str, consumer: str) -> None:
    async def handle(message: Message) -> None:
        if message.payload == b"work":
            await asyncio.Event().wait()

    async with open_broker(url) as broker:
        subscriber = Subscriber(broker, group="billing", group_start="0", consumer=consumer, max_in_flight=1)
        await subscriber.consume("orders", handle)


asyncio.run(main(*sys.argv[1:]))
