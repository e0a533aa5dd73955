"""A process with a member of a partitioned topic. Its handler records starts and ends in a file."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from millstream import Router, open_broker
from millstream.assignment import PartitionedSubscriber
from millstream.messaging import Message

from chaos.assignment_worker import SETTINGS  # isort: skip


async def main(url: str, name: str, path: str, topic: str, partitions: int) -> None:
    PartitionedSubscriber.__init__.__kwdefaults__["settings"] = SETTINGS  # leases as short as the trial needs
    journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str, message: Message) -> None:
        line = f"{time.monotonic():.6f} {name} {event} {message.key} {message.payload.decode()}\n"
        os.write(journal, line.encode())

    async with open_broker(url) as broker:
        router = Router(broker, group_start="0", block_ms=100, max_in_flight=500)

        @router.on(topic, group="g", partitions=partitions, consumer=name)
        async def handle(message: Message) -> None:
            note("began", message)
            await asyncio.sleep(0.01)
            note("done", message)

        await router.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
