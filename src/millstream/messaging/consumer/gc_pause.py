"""Pauses the garbage collector of the process while many topics start. The reasons and figures: docs/decisions/0018."""

from __future__ import annotations

import asyncio
import gc
import threading

GC_PAUSE_MIN_TOPICS = 200
"""Topics that start at the same time: for fewer the garbage collector is not paused."""
GC_COLLECT_MIN_TOPICS = 2_000
"""After so many topics, if they are half of all or more, the collector runs once."""
GC_RESUME_DELAY_S = 0.5
"""Claimed streams arrive some hundreds at a time: between two such groups the pause continues."""
GC_PAUSE_MAX_S = 10.0
"""The pause affects the whole process, so it ends after this time, whatever delays the topics."""


class GcPause:
    """Pauses the garbage collector while hundreds of topics start. Each topic is about fifty objects, none of them
    garbage, and the collector would examine all of them again and again: a third of the start of ten thousand topics.
    It runs once at the end, because it would otherwise run while the first messages wait.

    For one event loop. Each ``begin`` is followed by one ``end``.
    """

    def __init__(self) -> None:
        self._beginning = 0
        self._begun = 0
        self._timer: threading.Timer | None = None
        """Set during a pause. Not a timer of the loop: if the loop were closed meanwhile, the pause would never end."""
        self._lingering: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._beginning += 1
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._beginning == GC_PAUSE_MIN_TOPICS and self._timer is None and gc.isenabled():
            gc.disable()
            self._timer = threading.Timer(GC_PAUSE_MAX_S, gc.enable)
            self._timer.daemon = True
            self._timer.start()

    def end(self, topics: int) -> None:
        """``topics``: the number of all topics."""
        self._beginning -= 1
        self._begun += 1
        if self._beginning or self._timer is None:
            return
        if self._begun >= max(GC_COLLECT_MIN_TOPICS, topics // 2):
            self._begun = 0
            gc.collect()
        self._lingering = asyncio.get_running_loop().call_later(GC_RESUME_DELAY_S, self._resume)

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.enable()
