"""A sync handler that never returns does not keep the process alive."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import asyncio, time
from millstream import Message, Publisher, Router, open_broker

async def main():
    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        router = Router(broker, group_start="0", close_timeout_ms=100)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        @router.on("orders", group="g")
        def hang(message: Message) -> None:
            loop.call_soon_threadsafe(started.set)
            time.sleep(60)

        async with router:
            await publisher.publish("orders", Message(b"x"))
            await started.wait()

asyncio.run(main())
"""


def test_process_exits_although_a_sync_handler_hangs() -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=50)
    assert time.monotonic() - began < 40
