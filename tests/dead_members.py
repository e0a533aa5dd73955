"""Members of a service that die in a test: as SIGKILL would do it, and at a moment that the test chooses.

A lease that is short enough to be waited for could also run out of those who live, while the machine stands still. So
leases are long here, and of the dead they run out when a test says so.
"""

from __future__ import annotations

import asyncio

from millstream.assignment import AssignmentClient
from millstream.broker import leases


async def crash(client: AssignmentClient) -> None:
    """Ends it without a word to anybody. Its lease goes on."""
    for task in client._tasks:
        task.cancel()
    await asyncio.gather(*client._tasks, return_exceptions=True)


async def lease_runs_out(client: AssignmentClient) -> None:
    """Of one that is dead: first its place among the members, then the locks that tell Go members of it."""
    steps = client._steps
    held = list(steps.owned.values())
    await steps._send_heartbeat(1)
    locks = [key for lease in held for key in lease.locks]
    await steps.broker.run(leases.renew_leases, [lease.guard.key for lease in held], locks, lock_ttl_ms=1)
