"""What a client may cost. Every limit answers with an error that names it, or closes the one connection it is about."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass, field
from typing import Final

from millstream.wire import RequestLimits


@dataclass(frozen=True, slots=True)
class ServerLimits:
    clients: int = 10_000
    request: RequestLimits = field(default_factory=RequestLimits)
    listener_output_bytes: int = 32 << 20
    """A subscriber or monitor that does not read is cut off when so much waits for it."""
    paused_output_bytes: int = 1 << 20
    """Any other client that does not read its replies is not read from, until less than this waits for it."""
    waiting_input_bytes: int = 1 << 20
    """A client whose command waits may send so much ahead, counted by what it takes in our memory."""
    turn_us: int = 5000
    """After so many microseconds for one client, parsing included, the others have their turn."""
    drain_ms: int = 5000
    """How long a stopping server waits for clients to take their last replies."""


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
