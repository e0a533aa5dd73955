"""What a client may cost. Every limit answers with an error that names it, or closes the one connection it is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.wire.requests import RequestLimits


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
