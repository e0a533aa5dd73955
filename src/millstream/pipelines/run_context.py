"""What batches and deliverers of one pipeline share, from start to stop; and the gate between Spark and them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.model import Clock, Observer, SystemClock, quiet
from millstream.pipelines.errors import StopRequested
from millstream.pipelines.redis_address import SecretFiles

if TYPE_CHECKING:
    from millstream.pipelines.spool import Spool


class Gate:
    """``closing`` is set by whoever wants the pipeline to stop. A batch that comes later is turned away: it is planned
    but not begun, and Spark runs it at the next start."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._lock = threading.Condition()
        self._inside: int | None = None
        self.last_done: int | None = None

    @property
    def inside(self) -> int | None:
        """The batch at hand."""
        return self._inside

    @contextmanager
    def batch(self, batch_id: int) -> Iterator[None]:
        with self._lock:
            if self.closing.is_set():
                raise StopRequested("asked to stop; this batch was not begun, and comes again at the next start")
            self._inside = batch_id
        try:
            yield
            self.last_done = batch_id
        finally:
            with self._lock:
                self._inside = None
                self._lock.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """Lets nothing more in and waits until nobody is inside; false where that took too long."""
        with self._lock:
            self.closing.set()
            return self._lock.wait_for(lambda: self._inside is None, timeout_s)


@dataclass(slots=True)
class RunContext:
    """``troubles`` holds the gating sinks that have not taken the batch at hand, and what is done about it;
    ``newest_ms`` is the time of the newest event that all of them have."""

    application: str
    secrets: SecretFiles = field(default_factory=SecretFiles)
    spools: dict[str, Spool] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    observer: Observer = quiet
    clock: Clock = field(default_factory=SystemClock)
    troubles: dict[str, str] = field(default_factory=dict)
    newest_ms: int | None = None
