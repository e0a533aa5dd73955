"""How far behind a pipeline is while a batch takes long.

Spark reports on a batch when it is done, and one whose sink is being retried may not be done for hours. So a thread of
its own asks, and nobody who looks has to wait for an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from millstream.pipelines.backoff import short
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.gate import Gate
from millstream.pipelines.surroundings import Surroundings

log = logging.getLogger("millstream.pipelines")
_TICK_S = 1.0


class _Found(NamedTuple):
    batch: int
    entries: int | None


class LagWatch:
    """Asks once a tick, and only while one batch is at hand for longer than that. ``behind`` is told where the last
    finished batch ended, None where there is none."""

    def __init__(
        self,
        name: str,
        behind: Callable[[Any], int | None],
        checkpoint: Checkpoint,
        gate: Gate,
        around: Surroundings,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        self._name = name
        self._ask = behind
        self._checkpoint = checkpoint
        self._gate = gate
        self._around = around
        self._tick_s = tick_s
        self._found: _Found | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="millstream-lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def shown(self) -> dict[str, Any]:
        """The lag of the batch at hand, in place of what Spark said of the one before; empty where that still holds."""
        found = self._found
        return {} if found is None or found.batch != self._gate.inside else {"lag": found.entries}

    def _loop(self) -> None:
        before: int | None = None
        while not self._stop.wait(self._tick_s):
            batch = self._gate.inside
            if batch is not None and batch == before:
                self._look(batch)
            before = batch

    def _look(self, batch: int) -> None:
        entries = self._behind(batch)
        self._found = _Found(batch, entries)
        facts: dict[str, int] = {} if entries is None else {"entries": entries}
        if self._around.newest_ms is not None:
            facts["newest_age_ms"] = self._around.clock.now_ms() - self._around.newest_ms
        if facts and batch == self._gate.inside:
            self._around.observer("pipeline.lag", pipeline=self._name, **facts)

    def _behind(self, batch: int) -> int | None:
        try:
            finished = self._checkpoint.ends(batch - 1)
            return self._ask(finished[0] if finished else None)
        except Exception as error:  # whatever it is, it is not the batch's: that goes on, and says its own
            log.debug("pipeline %s: the lag cannot be told: %s", self._name, short(error))
            return None
