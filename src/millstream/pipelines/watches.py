"""Looks that go on beside the batches, each in a thread of its own: how far behind a pipeline is, and how the slot of
its database stands.

Spark reports on a batch when it is done, and one whose sink is being retried may not be done for hours; a slot that
nobody acknowledges fills the database's disk, worst of all while a pipeline stands still. So both are asked whether
batches end or not, and nobody who looks has to wait for an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.model import Observer
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import short
from millstream.pipelines.run_context import Gate, RunContext

if TYPE_CHECKING:
    from millstream.cdc import SlotStatus  # its module needs the driver, which only pipelines with a slot have

log = logging.getLogger("millstream.pipelines")
_LAG_TICK_S = 1.0
_SLOT_TICK_S = 5.0


class _Watch:
    """Looks once a tick, from ``start`` to ``stop``. A look that fails is said, and the next one comes."""

    def __init__(self, pipeline: str, what: str, tick_s: float) -> None:
        self._pipeline = pipeline
        self._tick_s = tick_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"millstream-{what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        raise AssertionError("every watch has its own")

    def said(self, why: str) -> None:
        """Tells that a look failed."""
        raise AssertionError("every watch has its own")

    def _loop(self) -> None:
        while not self._stop.wait(self._tick_s):
            try:
                self.look()
            except Exception as error:  # nobody would miss a thread that ends here
                self.said(short(error))


class _Lag(NamedTuple):
    batch: int
    entries: int | None


class LagWatch(_Watch):
    """Asks only while one batch is at hand for longer than a tick. ``behind`` is told where the last finished batch
    ended, None where there is none."""

    def __init__(
        self,
        name: str,
        behind: Callable[[Any], int | None],
        checkpoint: Checkpoint,
        gate: Gate,
        context: RunContext,
        *,
        tick_s: float = _LAG_TICK_S,
    ) -> None:
        super().__init__(name, "lag", tick_s)
        self._ask = behind
        self._checkpoint = checkpoint
        self._gate = gate
        self._context = context
        self._found: _Lag | None = None
        self._before: int | None = None

    def shown(self) -> dict[str, Any]:
        """The lag of the batch at hand, in place of what Spark said of the one before; empty where that still holds."""
        found = self._found
        return {} if found is None or found.batch != self._gate.inside else {"lag": found.entries}

    def look(self) -> None:
        batch, before = self._gate.inside, self._before
        self._before = batch
        if batch is None or batch != before:
            return
        entries = self._behind(batch)
        self._found = _Lag(batch, entries)
        facts: dict[str, int] = {} if entries is None else {"entries": entries}
        if self._context.newest_ms is not None:
            facts["newest_age_ms"] = self._context.clock.now_ms() - self._context.newest_ms
        if facts and batch == self._gate.inside:
            self._context.observer("pipeline.lag", pipeline=self._pipeline, **facts)

    def said(self, why: str) -> None:
        log.warning("pipeline %s: the lag was not told: %s", self._pipeline, why)  # an observer's fault, perhaps

    def _behind(self, batch: int) -> int | None:
        try:
            finished = self._checkpoint.ends(batch - 1)
            return self._ask(finished[0] if finished else None)
        except Exception as error:  # whatever it is, it is not the batch's: that goes on, and says its own
            log.debug("pipeline %s: the lag cannot be told: %s", self._pipeline, short(error))
            return None


def slot_facts(found: SlotStatus, unacknowledged_s: float | None = None) -> dict[str, Any]:
    """A slot as a status tells it; when it was acknowledged last, only whoever watches it knows."""
    facts = {"name": found.slot, "active": found.active, "held_bytes": found.held_bytes, "wal_status": found.wal_status}
    return {**facts, "unacknowledged_s": unacknowledged_s}


class SlotWatch(_Watch):
    """Tells ``pipeline.slot`` once a tick. ``ask`` answers None where there is no slot (yet)."""

    def __init__(
        self, pipeline: str, ask: Callable[[], SlotStatus | None], observer: Observer, *, tick_s: float = _SLOT_TICK_S
    ) -> None:
        super().__init__(pipeline, "slot", tick_s)
        self._ask = ask
        self._observer = observer
        self._acknowledged: tuple[int, float] | None = None
        self._found: SlotStatus | None = None

    def said(self, why: str) -> None:
        # The database is away, perhaps: the source says that itself.
        log.debug("pipeline %s: its slot cannot be looked at: %s", self._pipeline, why)

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
