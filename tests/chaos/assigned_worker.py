"""An assigned subscriber in a process of its own: each handler notes in a file when it begins and when it is done."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from millstream import open_broker
from millstream.assignment import AssignedSubscriber
from millstream.messaging import Message

from chaos.assignment_worker import SETTINGS  # isort: skip


async def main(url: str, name: str, path: str, topic: str, partitions: int) -> None:
    journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str, message: Message) -> None:
        line = f"{time.monotonic():.6f} {name} {event} {message.key} {message.payload.decode()}\n"
        os.write(journal, line.encode())

    async def handle(message: Message) -> None:
        note("began", message)
        await asyncio.sleep(0.01)
        note("done", message)

    async with open_broker(url) as broker:
        running = AssignedSubscriber(
            broker,
            "svc",
            handle,
            group="g",
            topic=topic,
            partitions=partitions,
            member=name,
            settings=SETTINGS,
            block_ms=100,
            max_in_flight=500,
        )
        await running.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
