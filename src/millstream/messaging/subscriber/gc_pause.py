"""The collector of garbage rests while hundreds of topics begin at once.

Each topic is some fifty objects, none of them garbage, and the collector would go through all that there are again and
again while they are made: for ten thousand topics that takes a third of the time of their start. What is left to go
through afterwards it would go through in the middle of the first messages, which wait meanwhile; so it does at the end.
"""

from __future__ import annotations

import gc
import threading

MANY = 200
"""Topics that begin at a time: fewer are left to the collector."""
VERY_MANY = 2_000
"""After so many, and where they are half of all or more, it goes through everything once."""
LONGEST_S = 10.0
"""It rests for everybody in this process, so not for longer than that, whatever holds the topics up."""


class GcPause:
    """For one event loop. Whoever begins ends, whatever becomes of it."""

    def __init__(self) -> None:
        self._beginning = 0
        self._begun = 0
        self._timer: threading.Timer | None = None
        """Set while the collector rests because of us. No timer of the loop's: one that is closed in mid-start would
        never let the collector go on, and the process would only grow."""

    def begin(self) -> None:
        self._beginning += 1
        if self._beginning == MANY and self._timer is None and gc.isenabled():
            gc.disable()
            self._timer = threading.Timer(LONGEST_S, gc.enable)
            self._timer.daemon = True
            self._timer.start()

    def end(self, topics: int) -> None:
        """``topics``: how many there are in all."""
        self._beginning -= 1
        self._begun += 1
        if self._beginning:
            return
        paused = self._timer is not None
        self._resume()
        if paused and self._begun >= max(VERY_MANY, topics // 2):
            self._begun = 0
            gc.collect()

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.enable()
