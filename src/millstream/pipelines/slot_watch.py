"""How the slot of a database source stands: a slot that nobody acknowledges fills the database's disk.

Asked by a thread of its own, whether batches run or not: the worst case is a pipeline that stands still."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millstream.model import Observer
from millstream.pipelines.error_origin import short

if TYPE_CHECKING:
    from millstream.cdc import SlotStatus  # its module needs the driver, which only pipelines with a slot have

log = logging.getLogger("millstream.pipelines")
_TICK_S = 5.0


def slot_facts(found: SlotStatus, unacknowledged_s: float | None = None) -> dict[str, Any]:
    """A slot as a status tells it; when it was acknowledged last, only whoever watches it knows."""
    facts = {"name": found.slot, "active": found.active, "held_bytes": found.held_bytes, "wal_status": found.wal_status}
    return {**facts, "unacknowledged_s": unacknowledged_s}


class SlotWatch:
    """Tells ``pipeline.slot`` once a tick. ``ask`` answers None where there is no slot (yet)."""

    def __init__(
        self, pipeline: str, ask: Callable[[], SlotStatus | None], observer: Observer, *, tick_s: float = _TICK_S
    ) -> None:
        self._pipeline = pipeline
        self._ask = ask
        self._observer = observer
        self._tick_s = tick_s
        self._acknowledged: tuple[int, float] | None = None
        self._found: SlotStatus | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="millstream-slot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                self.look()
            except Exception as error:  # the database is away, perhaps: the source says that itself
                log.debug("pipeline %s: its slot cannot be looked at: %s", self._pipeline, short(error))

    def shown(self) -> dict[str, Any]:
        """How it stood at the last look, for the pipeline's status; empty where there was none yet."""
        found, acknowledged = self._found, self._acknowledged
        if found is None or acknowledged is None:
            return {}
        return {"slot": slot_facts(found, time.monotonic() - acknowledged[1])}

    def look(self) -> None:
        found = self._found = self._ask()
        if found is None:
            return
        now = time.monotonic()
        if self._acknowledged is None or self._acknowledged[0] != found.confirmed:
            self._acknowledged = found.confirmed, now
        self._observer(
            "pipeline.slot",
            pipeline=self._pipeline,
            slot=found.slot,
            active=found.active,
            held_bytes=found.held_bytes,
            wal_status=found.wal_status,
            unacknowledged_s=now - self._acknowledged[1],
        )
