"""Background jobs: an API publishes jobs and returns; workers run, retry, and dead-letter what never succeeds.

python examples/background_jobs.py                                        (in this process)
MILLSTREAM_URL=redis://localhost:6379 python examples/background_jobs.py  (on a server)
"""

import asyncio
import json
import os

from millstream import open_broker
from millstream.messaging import Backoff, DeadLetters, Message, Publisher, Router, retry
from millstream.testing import eventually

JOBS = "example.jobs"


async def main() -> None:
    async with open_broker(os.environ.get("MILLSTREAM_URL", "local://")) as broker:
        await broker.delete_stream(JOBS, companions=True)
        done: list[str] = []
        flaky_failures = iter([True, True])
        router = Router(broker)

        # max_deliveries counts attempts. After the last one the job is dead-lettered with its error.
        @router.on(
            JOBS,
            group="workers",
            group_start="0",
            max_deliveries=3,
            backoff=Backoff(initial_ms=10),
            middleware=[retry(1, initial_interval_ms=10)],
        )
        async def execute(message: Message) -> None:
            job = json.loads(message.payload)
            match job["type"]:
                case "resize-image":
                    pass
                case "send-email":
                    if next(flaky_failures, False):
                        raise ConnectionError("the mail server does not answer")
                case unknown:
                    raise ValueError(f"no worker knows the job {unknown!r}")
            done.append(job["type"])
            print(f"done: {job['type']} (delivery {message.times_delivered})")

        async with Publisher(broker) as publisher, router:
            for kind in ("resize-image", "send-email", "fold-laundry"):
                # Stored when this returns. The API that called it can answer its user now.
                await publisher.publish(JOBS, Message(json.dumps({"type": kind}).encode()))
            dead_letters = DeadLetters(broker, JOBS)
            await eventually(lambda: len(done) == 2, what="the two jobs that succeed")
            await eventually(dead_letters.count, what="the job that fails")

        for failure in await dead_letters.by_error():
            print(f"dead-lettered: {failure.count} x {failure.error_type}: {failure.example}")
        await broker.delete_stream(JOBS, companions=True)


asyncio.run(main())
