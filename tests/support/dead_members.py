"""Members of a service that die in a test as after SIGKILL, and whose leases expire when the test decides.

A lease that is short enough to wait for could also expire for live members on a busy machine. So leases are long, and
those of dead members are ended by the test.
"""

from __future__ import annotations

import asyncio

from millstream.assignment import AssignmentClient
from millstream.broker.scripts import leases


async def crash(client: AssignmentClient) -> None:
    """Ends the member as a kill does: it releases nothing, and its lease stays until it expires."""
    if client._watch is not None:  # its thread renews leases while the event loop is blocked
        client._watch.stop()
    for task in client._tasks:
        task.cancel()
    await asyncio.gather(*client._tasks, return_exceptions=True)


async def lease_runs_out(client: AssignmentClient) -> None:
    """Expires the lease of a dead member: first its member row, then the locks by which Go members know it."""
    steps = client._steps
    held = list(steps.owned.values())
    await steps._send_heartbeat(1)
    locks = [key for lease in held for key in lease.locks]
    await steps.broker.run(leases.renew_leases, [lease.fence.key for lease in held], locks, lock_ttl_ms=1)
