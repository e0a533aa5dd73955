"""Where an optional sink's batches wait, on disk, one directory a batch, bounded; and the thread that delivers them,
oldest first.

Everything for an optional sink goes through here, also when it is well: then a sink that is slow, hangs or is gone
can never hold the others up, and "in order, before anything newer" needs no second path.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.pipelines.checkpoint import write_atomically
from millstream.pipelines.error_origin import delay_ms, short
from millstream.pipelines.plan import PipelinePlan, config_of
from millstream.pipelines.run_context import RunContext
from millstream.pipelines.session import activate
from millstream.pipelines.sinks import Sink, Write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DELIVERED = "delivered"
_DIGITS = 20


class Spool:
    """One sink's. Batches are put by the pipeline's thread and taken by one deliverer; ``arrived`` wakes it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.arrived = threading.Event()
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        delivered = self.delivered()
        for leftover in directory.iterdir():
            # A crash left it: half a batch, which was not committed and will be put again, or one that the sink has.
            if leftover.suffix == ".partial" or (leftover.name.isdigit() and int(leftover.name) <= delivered):
                shutil.rmtree(leftover)

    def put(self, batch_id: int, write: Callable[[str], None]) -> bool:
        """Stores a batch: ``write`` fills a directory, which gets its name when it is complete.

        A replayed batch that is here already, or was delivered, is not stored again: its rows are those on disk.
        """
        target = self._at(batch_id)
        if batch_id <= self.delivered() or target.exists():
            return False
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(str(partial))
        partial.rename(target)
        self.arrived.set()
        return True

    def oldest(self) -> tuple[int, Path] | None:
        return next(self._waiting(), None)

    def count(self) -> int:
        return sum(1 for _ in self._waiting())

    def size(self) -> int:
        return sum(_bytes(path) for _, path in self._waiting())

    def full(self) -> bool:
        return self.size() >= self.max_bytes

    def done(self, batch_id: int) -> None:
        """The sink has it. Recorded before the rows go: a crash in between delivers again, and append_once skips."""
        with self._lock:
            # The deliverer and a full spool may give up the same batch at once; and none may take the mark back.
            if batch_id > self.delivered():
                write_atomically(self.directory / _DELIVERED, str(batch_id))
        shutil.rmtree(self._at(batch_id), ignore_errors=True)

    def drop_oldest(self) -> int | None:
        """Gives the oldest batch up, and says which it was."""
        found = self.oldest()
        if found is None:
            return None
        self.done(found[0])
        return found[0]

    def delivered(self) -> int:
        """The last batch that the sink has, or that was given up; -1 where there was none."""
        try:
            return int((self.directory / _DELIVERED).read_text(encoding="ascii"))
        except FileNotFoundError:
            return -1

    def _at(self, batch_id: int) -> Path:
        return self.directory / f"{batch_id:0{_DIGITS}d}"

    def _waiting(self) -> Iterator[tuple[int, Path]]:
        delivered = self.delivered()
        for name in sorted(os.listdir(self.directory)):
            if name.isdigit() and int(name) > delivered:
                yield int(name), self.directory / name


def _bytes(batch: Path) -> int:
    """Of a batch that the deliverer may remove meanwhile: then it is gone, and takes no room."""
    try:
        return sum(file.stat().st_size for file in batch.iterdir())
    except FileNotFoundError:
        return 0


log = logging.getLogger("millstream.pipelines")
_IDLE_S = 0.5


class Deliverer:
    """It never gives up by itself: an optional sink may be gone for days, and the spool's bound is the limit."""

    def __init__(
        self, session: SparkSession, plan: PipelinePlan, sink: Sink, spool: Spool, context: RunContext
    ) -> None:
        self._session = session
        self._plan = plan
        self._sink = sink
        self._spool = spool
        self._context = context
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
                self._context.observer(
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
        write = Write(self._context.application, batch_id, self.name, self._plan.delivery, self._context.addresses)
        delivered = self._sink.deliver(self._session, Path(str(path)), write)
        self._spool.done(batch_id)
        self._context.observer(
            "pipeline.sink",
            pipeline=self._plan.pipeline.name,
            sink=self.name,
            batch=batch_id,
            rows=delivered.rows,
            bytes=delivered.bytes,
            s=time.monotonic() - began,
        )
        self._context.observer(
            "pipeline.delivered", pipeline=self._plan.pipeline.name, sink=self.name, waiting=self._spool.count()
        )
