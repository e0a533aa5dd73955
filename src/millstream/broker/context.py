"""What an operation may know of the broker it runs for: settings and small memories, never a connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.broker.limits import DEFAULT_LIMITS, Limits
from millstream.broker.steps.script import Guard
from millstream.model.clock import Clock, SystemClock
from millstream.model.observer import Observer, quiet


@dataclass(slots=True)
class Context:
    """One for each open broker. Operations receive it first; tests make one with no arguments."""

    max_stream_len: int | None = None
    """Keep streams about this short by safe trim; None leaves them alone."""
    hard_max_stream_len: int | None = None
    """Never much longer than this, whatever groups still need; None: groups come first."""
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    limits: Limits = DEFAULT_LIMITS
    guard: Guard | None = None
    """The owner record behind which deliveries are settled; None: whoever holds a delivery may settle it."""
    cluster: bool = False
    """Keys live on several nodes."""
    until_trim: dict[bytes, int] = field(default_factory=dict)
    """Stream to the number of adds that are left until it is trimmed again."""
    durability_seen: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slot (0 off a cluster) to when the server's durability was read, and what it was."""
