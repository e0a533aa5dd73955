"""Where an optional sink's batches wait, on disk, one directory a batch, bounded; and the thread that delivers them,
oldest first.

Everything for an optional sink goes through here, also when it is well: then a sink that is slow, hangs or is gone
can never hold the others up, and "in order, before anything newer" needs no second path.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.pipelines.checkpoint import write_atomically
from millstream.pipelines.errors import SpoolDamaged, is_fatal, short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.session import activate
from millstream.pipelines.sinks import Sink, Write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.pipelines.run_context import RunContext

log = logging.getLogger("millstream.pipelines")
_DELIVERED = "delivered"
_COMPLETE = "_SUCCESS"
_ROWS = "_rows"
_DIGITS = 20
_IDLE_S = 0.5


class Spool:
    """One sink's. Batches are put by the pipeline's thread and taken by one deliverer; ``arrived`` wakes it.

    Spark's own checkpoint lies on the same disk: ``min_free`` bytes of it are left alone.
    """

    def __init__(self, directory: Path, max_bytes: int, min_free: int = 0) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.min_free = min_free
        self.arrived = threading.Event()
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        delivered = self.delivered()
        for leftover in directory.iterdir():
            # A crash left it: half a batch, which was not committed and will be put again, or one that the sink has.
            if leftover.suffix == ".partial" or (leftover.name.isdigit() and int(leftover.name) <= delivered):
                shutil.rmtree(leftover)

    def put(self, batch_id: int, write: Callable[[str], int | None]) -> bool:
        """Stores a batch: ``write`` fills a directory and says how many rows it holds, where that is known. The
        directory gets its name when all of it is on the disk: the checkpoint moves on in the belief that it is.

        A replayed batch that is here already, or was delivered, is not stored again: its rows are those on disk.
        """
        target = self._at(batch_id)
        if batch_id <= self.delivered():
            return False
        if target.exists():
            _sync(self.directory)  # which may be what failed, when it was put before
            return False
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            rows = write(str(partial))
            if not (partial / _COMPLETE).exists():
                raise SpoolDamaged(str(partial), "what should fill it did not say that it is complete")
            if rows is not None:
                (partial / _ROWS).write_text(str(rows), encoding="ascii")
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self.directory)
        self.arrived.set()
        return True

    def oldest(self) -> tuple[int, Path] | None:
        return next(self._waiting(), None)

    def count(self) -> int:
        return sum(1 for _ in self._waiting())

    def size(self) -> int:
        return sum(_bytes(path) for _, path in self._waiting())

    def full(self) -> bool:
        return self.size() >= self.max_bytes or self.took_the_reserve()

    def took_the_reserve(self) -> bool:
        """Whether less is free on the disk than is to be left for others."""
        return shutil.disk_usage(self.directory).free < self.min_free

    def done(self, batch_id: int) -> None:
        """The sink has it. Recorded before the rows go: a crash in between delivers again, and append_once skips."""
        with self._lock:
            # The deliverer and a full spool may give up the same batch at once; and none may take the mark back.
            if batch_id > self.delivered():
                write_atomically(self.directory / _DELIVERED, str(batch_id))
        shutil.rmtree(self._at(batch_id), ignore_errors=True)

    def drop_oldest(self) -> int | None:
        """Gives the oldest batch up, and says which it was. FileNotFoundError: the sink took it in this moment."""
        found = self.oldest()
        if found is None:
            return None
        batch_id, rows = found
        # The rows go before the mark here: on a full disk there is no room for the mark until they are gone.
        doomed = rows.with_suffix(".partial")
        rows.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        self.done(batch_id)
        return batch_id

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


def rows_of(batch: Path) -> int | None:
    """How many rows a stored batch holds; None where it was stored by a version that did not say.

    Raises SpoolDamaged where it is not whole: what is missing in it would pass for delivered.
    """
    if not (batch / _COMPLETE).exists() or not any(batch.glob("*.parquet")):
        raise SpoolDamaged(str(batch), "its files are not all there")
    try:
        return int((batch / _ROWS).read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise SpoolDamaged(str(batch), f"its file {_ROWS} does not tell how many rows it has") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(batch: Path) -> int:
    """Of a batch that the deliverer may remove meanwhile: then it is gone, and takes no room."""
    try:
        return sum(file.stat().st_size for file in batch.iterdir())
    except FileNotFoundError:
        return 0


class Deliverer:
    """An optional sink may be gone for days, and the spool's bound is the limit. Only an error that waiting cannot mend
    parks it as ``failed``, told and counted, until somebody says ``start_again``."""

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
        self._parked = False
        self._thread = threading.Thread(target=self._loop, name=f"millstream-deliver-{self.name}", daemon=True)

    @property
    def name(self) -> str:
        return self._sink.config.id

    @property
    def state(self) -> str:
        if self._parked:
            return "failed"
        waiting = self._spool.count()
        return "failing" if self._failing and waiting else "catching up" if waiting else "ok"

    def start(self) -> None:
        self._thread.start()

    def start_again(self) -> None:
        """Tries once more what has failed for good: somebody has mended it."""
        self._parked = False
        self._spool.arrived.set()

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
        backoff = self._plan.pipeline.spec.retry.backoff
        tries = 0
        while not self._stop.is_set():
            found = None
            try:
                found = None if self._parked else self._spool.oldest()
                if found is not None:
                    self._deliver(*found)
                tries, self._failing = 0, self._parked
            except Exception as error:  # whatever it is: the thread that ends here would never be missed
                tries, self._failing = tries + 1, True
                # A batch that is gone was given up meanwhile, because the spool is full: nothing is damaged then.
                self._tell_failure(error, tries, final=is_fatal(error) and (found is None or found[1].exists()))
                if not self._parked:
                    self._stop.wait(backoff.delay_ms(tries, random.random()) / 1000)  # noqa: S311  # no secret
                continue
            if found is None:
                self._spool.arrived.wait(_IDLE_S)
                self._spool.arrived.clear()

    def _tell_failure(self, error: Exception, tries: int, *, final: bool) -> None:
        name, why = self._plan.pipeline.name, short(error)
        self._context.observer("pipeline.sink_error", pipeline=name, sink=self.name, error=why, attempt=tries)
        if final:
            self._parked = True
            log.error(
                "optional sink %s has failed: %s. Its batches wait on disk; mend it, and start it again: "
                "POST /pipelines/%s/sinks/%s/start, or the pipeline as a whole",
                *(self.name, why, name, self.name),
            )
            self._context.observer("pipeline.sink_failed", pipeline=name, sink=self.name, error=why)
        else:
            log.warning("optional sink %s: its batches wait: %s", self.name, why)

    def _deliver(self, batch_id: int, path: Path) -> None:
        began = time.monotonic()
        context, name = self._context, self._plan.pipeline.name
        expected = rows_of(path)
        write = Write(context.application, batch_id, self.name, self._plan.delivery, context.secrets)
        delivered = self._sink.deliver(self._session, path, write)
        if expected is not None and delivered.rows != expected:
            raise SpoolDamaged(str(path), f"{expected} rows were stored, and {delivered.rows} were delivered")
        self._spool.done(batch_id)
        numbers = {"rows": delivered.rows, "bytes": delivered.bytes, "s": time.monotonic() - began}
        context.observer(
            "pipeline.sink", pipeline=name, sink=self.name, batch=batch_id, dropped=delivered.dropped, **numbers
        )
        context.observer("pipeline.delivered", pipeline=name, sink=self.name, waiting=self._spool.count())
