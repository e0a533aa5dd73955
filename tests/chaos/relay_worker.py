"""A worker process for chaos tests: a router whose handler returns an output for each message and writes the ledger.

SIGTERM ends it with exit code 0. Any other end is a fault.
"""

from __future__ import annotations

import asyncio
import sys

from millstream import Router, open_broker
from millstream.messaging import Message
from millstream.testing.ledger import HandlingLedger

OUTPUTS = "outputs"
CLAIM_MS = 6_000
"""Longer than a restart takes: no entries are claimed from a worker that is alive and waits for the server."""


async def main(url: str, topic: str, directory: str) -> None:
    ledger = HandlingLedger(directory)

    async with open_broker(url, deadline_ms=2_000) as broker:
        router = Router(broker, block_ms=200, count=20, claim_min_idle_ms=CLAIM_MS, claim_interval_ms=500)

        @router.on(topic, group="relay", group_start="0", publish_to=OUTPUTS)
        async def handle(message: Message) -> Message:
            token = message.payload.decode()
            ledger.started(token)
            await asyncio.sleep(0)
            ledger.done(token)
            return Message(message.payload)

        await router.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
