"""A worker process for chaos tests: handles messages, writes the ledger, and dies at the point that a message names."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

from millstream import open_broker
from millstream.messaging import Backoff, Message, Subscriber, run_until_signalled
from millstream.testing.ledger import HandlingLedger

QUICK: dict[str, Any] = {
    "group": "g",
    "group_start": "0",
    "block_ms": 100,
    "count": 10,
    "max_in_flight": 20,
    "claim_min_idle_ms": 1200,
    "claim_interval_ms": 100,
    "max_deliveries": 4,
    "backoff": Backoff(initial_ms=5, max_ms=50),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, topic: str, directory: str, options: dict[str, Any]) -> None:
    ledger = HandlingLedger(directory)
    chance = random.Random(os.getpid())
    slow_s = options.pop("slow_s", 0.02)
    many = options.pop("topics", 0)
    topics = [f"{topic}-{number}" for number in range(many)] or [topic]

    async def handle(message: Message) -> None:
        token = message.payload.decode()
        kind = token.partition(":")[0]
        first = message.times_delivered == 1
        if kind == "die-before" and first:
            die()
        ledger.started(token)
        await asyncio.sleep(chance.random() * slow_s)
        if kind == "killer" or (kind == "die-during" and first):
            die()
        if kind == "fails" and message.times_delivered < 3:
            ledger.failed(token)
            raise ValueError(token)
        ledger.done(token)
        if kind == "die-after" and first:
            die()

    async with open_broker(url, deadline_ms=2000) as broker:
        settings = {**QUICK, **options}
        subscriber = Subscriber(broker, **settings)
        # Heartbeats are sent three times in the claim time. A consumer that misses one and a half of them may lose its
        # entries. The ledger's beats use the same connection, so that a server without CPU time is noticed too.
        silent_s = settings["claim_min_idle_ms"] / 2000
        # The number of messages that it may have in flight: one pause cannot explain more redeliveries.
        held = min(settings["max_in_flight"] * len(topics), subscriber.settings.process_max_in_flight)
        beating = asyncio.create_task(ledger.keep_heartbeat(silent_s=silent_s, held=held, through=broker.ping))

        async def consume_all() -> None:
            await asyncio.gather(*(subscriber.consume(item, handle) for item in topics))

        await run_until_signalled(consume_all(), subscriber.close)
        beating.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
