"""A member of an assignment fleet with metrics, for the tests of alerts: ``lease_member.py URL MEMBER PORT``."""

from __future__ import annotations

import asyncio
import sys

from millstream import open_broker
from millstream.assignment import AssignmentClient, Settings
from millstream.observe import ServiceMonitor


async def main(url: str, member: str, port: str) -> None:
    monitor = ServiceMonitor(port=int(port))
    settings = Settings(lease_ms=1_000, renew_interval_ms=200, sweep_interval_ms=50)
    async with open_broker(url, observer=monitor) as broker:
        client = AssignmentClient(broker, "ingest", member=member, settings=settings)
        async with monitor.watch(client):
            async for _ in client.start():
                pass


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
