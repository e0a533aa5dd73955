"""Every client costs a file descriptor. A server that runs out of them can neither accept nor refuse."""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger("millstream.server")

RESERVED: Final = 32
"""For the journal, the listeners, and what the process opens beside clients."""


def make_room_for(clients: int) -> int:
    """Raises this process's limit as far as it may be raised. Returns how many clients there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = clients + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return clients
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    room = max(granted - RESERVED, 1)
    if room < clients:
        logger.warning("this process may have %d open files: room for %d clients, not %d", granted, room, clients)
    return room
