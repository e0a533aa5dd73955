"""What batches and deliverers of one pipeline share, from its start to its stop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from millstream.model import Clock, Observer, SystemClock, quiet
from millstream.pipelines.spool import Spool


@dataclass(slots=True)
class Surroundings:
    """``troubles`` holds the gating sinks that have not taken the batch at hand, and what is done about it;
    ``newest_ms`` is the time of the newest event that all of them have."""

    application: str
    addresses: dict[str, str] = field(default_factory=dict)
    spools: dict[str, Spool] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    troubles: dict[str, str] = field(default_factory=dict)
    newest_ms: int | None = None
