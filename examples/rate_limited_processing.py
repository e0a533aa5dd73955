"""Rate-limited processing: the handler calls a service that allows a limited number of calls per second.

No message is refused or lost. Messages wait in the stream: while the handler is throttled, fewer are read.

python examples/rate_limited_processing.py, or with MILLSTREAM_URL set to a server's address.
"""

import asyncio
import os
import time

from millstream import open_broker
from millstream.messaging import Message, Publisher, Router, throttle
from millstream.testing import eventually

TASKS = "example.tasks"
PER_SECOND = 50


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(TASKS, companions=True)
        router = Router(broker)
        router.use(throttle(PER_SECOND, per_ms=1_000))
        started: list[float] = []

        @router.on(TASKS, group="workers", group_start="0", max_in_flight=10)
        async def call_the_service(message: Message) -> None:
            started.append(time.monotonic())

        async with Publisher(broker) as publisher, router:
            await publisher.publish(TASKS, *(Message(b"%d" % n) for n in range(25)))
            await eventually(lambda: len(started) == 25, what="all calls")

        took = started[-1] - started[0]
        print(
            f"25 calls at {PER_SECOND} a second took at least {24 / PER_SECOND:.2f} s: {took >= 24 / PER_SECOND - 0.01}"
        )
        await broker.delete_stream(TASKS, companions=True)


asyncio.run(main())
