"""A worker process of the demo: ``python -m millstream.demo.worker TAG NAME FILE``.

It writes a line into FILE when a handler starts. When a handler succeeds, it publishes a result, atomically with the
acknowledgement. So a message whose worker was killed has a start but no result.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TextIO

from millstream.broker import open_broker
from millstream.demo.stage import GROUP, POISON, results, topics
from millstream.messaging import Backoff, Message, Subscriber, run_until_signalled

WORK_S = 0.01


async def work(url: str, tag: str, name: str, start_log: TextIO) -> None:
    async def handle(message: Message) -> Message:
        source = f"{message.topic} {message.id}"
        start_log.write(f"{source} {message.times_delivered}\n")
        start_log.flush()
        if message.fields is not None and message.fields.get(b"id") == POISON.encode():
            raise ValueError("this order cannot be fulfilled")
        await asyncio.sleep(WORK_S)
        return Message(json.dumps({"source": source, "worker": name}).encode())

    async with open_broker(url) as broker:
        subscriber = Subscriber(
            broker,
            group=GROUP,
            group_start="0",
            consumer=name,
            count=20,
            max_in_flight=4,
            block_ms=500,
            claim_min_idle_ms=2_000,
            claim_interval_ms=250,
            max_deliveries=3,
            backoff=Backoff(initial_ms=100),
        )
        reading = asyncio.gather(*(subscriber.consume(topic, handle, publish_to=results(tag)) for topic in topics(tag)))
        await run_until_signalled(reading, subscriber.close)


if __name__ == "__main__":
    tag, name, path = sys.argv[1:]
    with open(path, "a") as start_log:
        # The URL comes from the environment: command lines are visible to all users of the machine.
        asyncio.run(work(os.environ["MILLSTREAM_URL"], tag, name, start_log))
