"""Between Spark and a batch: lets a batch in or turns it away, so that stopping happens between batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.pipelines.errors import StopRequested


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
