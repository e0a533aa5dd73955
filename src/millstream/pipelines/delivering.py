"""The thread that brings an optional sink what waits for it on disk: oldest first, one by one, until told to stop."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from millstream.pipelines.backoff import delay_ms, short
from millstream.pipelines.plan import Plan, config_of
from millstream.pipelines.session import activate
from millstream.pipelines.sinks import Sink, Write
from millstream.pipelines.spool import Spool
from millstream.pipelines.surroundings import Surroundings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("millstream.pipelines")
_IDLE_S = 0.5


class Deliverer:
    """It never gives up by itself: an optional sink may be gone for days, and the spool's bound is the limit."""

    def __init__(self, session: SparkSession, plan: Plan, sink: Sink, spool: Spool, around: Surroundings) -> None:
        self._session = session
        self._plan = plan
        self._sink = sink
        self._spool = spool
        self._around = around
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._loop, name=f"millstream-deliver-{self.name}", daemon=True)

    @property
    def name(self) -> str:
        return config_of(self._sink).id

    @property
    def state(self) -> str:
        waiting = self._spool.count()
        return "failing" if self._failing and waiting else "catching up" if waiting else "ok"

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Ends the thread. With ``drain_s`` it may first deliver what waits, as long as the sink takes it."""
        until = time.monotonic() + drain_s
        while self._spool.count() and not self._failing and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.02)
        self._stop.set()
        self._spool.arrived.set()
        self._thread.join()

    def _loop(self) -> None:
        activate(self._session)
        tries = 0
        while not self._stop.is_set():
            found = self._spool.oldest()
            if found is None:
                self._spool.arrived.wait(_IDLE_S)
                self._spool.arrived.clear()
                continue
            try:
                self._deliver(*found)
                tries, self._failing = 0, False
            except Exception as error:
                tries, self._failing = tries + 1, True
                wait_ms = delay_ms(self._plan.pipeline.spec.retry, tries)
                self._around.observer(
                    "pipeline.sink_error",
                    pipeline=self._plan.pipeline.name,
                    sink=self.name,
                    error=short(error),
                    attempt=tries,
                )
                log.warning("optional sink %s: batch %d waits: %s", self.name, found[0], short(error))
                self._stop.wait(wait_ms / 1000)

    def _deliver(self, batch_id: int, path: object) -> None:
        from pathlib import Path

        began = time.monotonic()
        write = Write(self._around.application, batch_id, self.name, self._plan.delivery, self._around.addresses)
        delivered = self._sink.deliver(self._session, Path(str(path)), write)
        self._spool.done(batch_id)
        self._around.observer(
            "pipeline.sink",
            pipeline=self._plan.pipeline.name,
            sink=self.name,
            batch=batch_id,
            rows=delivered.rows,
            bytes=delivered.bytes,
            s=time.monotonic() - began,
        )
        self._around.observer(
            "pipeline.delivered", pipeline=self._plan.pipeline.name, sink=self.name, waiting=self._spool.count()
        )
