"""A process with a member that makes fenced writes to its streams until they are disowned or rejected."""

from __future__ import annotations

import asyncio
import sys

from millstream import Broker, open_broker
from millstream.assignment import AssignmentClient, FencingToken, StreamAdded, StreamDisowned
from millstream.assignment.membership import Settings
from millstream.errors import BrokerUnavailable, StaleOwner

SETTINGS = Settings(lease_ms=1_000, renew_interval_ms=300, sweep_interval_ms=100)


async def work(broker: Broker, token: FencingToken) -> None:
    mine = broker.fenced(token)
    while True:
        try:
            await mine.xadd(token.stream, {"member": token.member, "token": token.number})
        except StaleOwner:
            return
        except BrokerUnavailable:
            pass  # the server is away for a while; the next write shows whether this member still owns the stream
        await asyncio.sleep(0.02)


async def main(url: str, name: str) -> None:
    async with open_broker(url) as broker:
        client = AssignmentClient(broker, "svc", member=name, settings=SETTINGS)
        working: dict[str, asyncio.Task[None]] = {}
        async for notification in client.start():
            if isinstance(notification, StreamAdded) and notification.token is not None:
                working[notification.stream] = asyncio.create_task(work(broker, notification.token))
            elif isinstance(notification, StreamDisowned) and notification.stream in working:
                working.pop(notification.stream).cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
