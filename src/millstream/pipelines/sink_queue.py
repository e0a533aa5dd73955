"""The queue of an optional sink, in the pipeline's checkpoint, and the thread that delivers its batches in order.

Every batch for an optional sink goes through its queue, also while the sink works. So a sink that is slow, hangs or is
gone never delays the other sinks, and the order of batches needs no second path.

<batch id>-<random>/    Parquet files, written by Spark's executors
<batch id>.json         the manifest: the directory, its files with their sizes, and the number of rows
delivered               the last batch that the sink has, or that was dropped

A batch is in the queue once its manifest exists. The manifest is created atomically after all files are complete, so no
store needs an atomic rename of directories, and files of a task that outlived a killed driver are never read.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from millstream.pipelines.checkpoint import MANIFEST_SUFFIX, is_manifest
from millstream.pipelines.errors import SinkQueueDamaged, is_fatal, short
from millstream.pipelines.plan import PipelinePlan
from millstream.pipelines.session import activate
from millstream.pipelines.sinks import Sink, Write
from millstream.storage import ObjectMissing, Storage, StorageError
from millstream.storage.location import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.pipelines.run_context import RunContext

log = logging.getLogger("millstream.pipelines")
_DELIVERED = "delivered"
_COMPLETE = "_SUCCESS"
_PARQUET = ".parquet"
_DIGITS = 20
_IDLE_S = 0.5
STOP_S = 60.0
_INTERRUPTED_S = 1.0
"""How long an interrupted stop waits for a delivery in progress."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of a sink queue, as its manifest describes it. ``files`` holds names and sizes."""

    storage: Storage
    id: int
    directory: str
    rows: int
    files: tuple[tuple[str, int], ...]

    @property
    def location(self) -> str:
        return self.storage.uri(self.directory)

    @property
    def uris(self) -> list[str]:
        """For Spark."""
        return [for_spark(self.storage.uri(f"{self.directory}/{name}")) for name, _ in self.files]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)

    def verify(self) -> None:
        """Raises SinkQueueDamaged if a file is missing or cut off: its rows would count as delivered."""
        present = {entry.name: entry.size for entry in self.storage.list(self.directory)}
        for name, size in self.files:
            if name not in present:
                raise SinkQueueDamaged(self.location, f"its file {name} is missing")
            if present[name] != size:
                raise SinkQueueDamaged(self.location, f"its file {name} has {present[name]} of {size} bytes")

    @contextmanager
    def local_files(self) -> Iterator[list[str]]:
        """Paths on this host: the files themselves, or copies of them as long as the block lasts."""
        if self.storage.is_local:
            yield [self.storage.uri(f"{self.directory}/{name}") for name, _ in self.files]
            return
        with tempfile.TemporaryDirectory(prefix="millstream-") as directory:
            for name, _ in self.files:
                self.storage.fetch(f"{self.directory}/{name}", Path(directory, name))
            yield [str(Path(directory, name)) for name, _ in self.files]


class SinkQueue:
    """The queue of one sink. The pipeline's thread puts batches, one deliverer takes them; ``arrived`` wakes it.

    Only one process at a time uses a queue, so the list of its batches is kept in memory. Spark's own checkpoint is in
    the same store: ``min_free`` bytes of it are left free.
    """

    def __init__(self, storage: Storage, max_bytes: int, min_free: int = 0) -> None:
        self.storage = storage
        self.max_bytes = max_bytes
        self.min_free = min_free
        self.arrived = threading.Event()
        self._lock = threading.Lock()
        storage.make()
        self._delivered = self._last_delivered()
        self._batches: dict[int, StoredBatch] = {}
        self._dropping: StoredBatch | None = None
        self._load()

    def _load(self) -> None:
        """Reads the manifests, and removes what a crash left: unfinished batches, and those that the sink has."""
        entries = self.storage.list()
        for entry in entries:
            if is_manifest(entry.name):
                batch_id = int(entry.name.removesuffix(MANIFEST_SUFFIX))
                if batch_id <= self._delivered:
                    self.storage.delete(entry.name)
                else:
                    self._batches[batch_id] = self._stored(batch_id)
        used = {batch.directory for batch in self._batches.values()}
        for entry in entries:
            if entry.is_directory and entry.name not in used:
                self.storage.delete(entry.name)

    def put(self, batch_id: int, write: Callable[[str], int]) -> bool:
        """Stores a batch: ``write`` fills a directory, given as a path or URI, and returns the number of rows.

        The batch is durable when this returns, because the checkpoint moves on. A replayed batch that is stored
        already, or was delivered, is not stored again: its rows are those of the first time.
        """
        if batch_id <= self._delivered:
            return False
        if batch_id in self._batches:
            return False
        directory = f"{batch_id:0{_DIGITS}d}-{token_hex(4)}"
        try:
            batch = self._filled(batch_id, directory, write)
        except BaseException:  # also after an interruption: only the next start would remove it
            self._remove(directory)
            raise
        record = {"directory": directory, "rows": batch.rows, "files": batch.files}
        # If this fails, the store may have created it all the same: the directory must stay.
        created = self.storage.create(_manifest(batch_id), json.dumps(record).encode())
        if not created:
            batch = self._stored(batch_id)  # of an earlier attempt, whose reply was lost
            if batch.directory != directory:
                self._remove(directory)
        with self._lock:
            self._batches[batch_id] = batch
        self.arrived.set()
        return created

    def _filled(self, batch_id: int, directory: str, write: Callable[[str], int]) -> StoredBatch:
        rows = write(self.storage.uri(directory))
        entries = self.storage.list(directory)
        if all(entry.name != _COMPLETE for entry in entries):
            raise SinkQueueDamaged(self.storage.uri(directory), "Spark did not report it as complete")
        files = tuple((entry.name, entry.size) for entry in entries if entry.name.endswith(_PARQUET))
        if not files:
            raise SinkQueueDamaged(self.storage.uri(directory), "it has no Parquet file")
        self.storage.persist(directory)
        return StoredBatch(self.storage, batch_id, directory, rows, files)

    def oldest(self) -> StoredBatch | None:
        with self._lock:
            return self._batches[min(self._batches)] if self._batches else None

    def holds(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def count(self) -> int:
        return len(self._batches)

    def size(self) -> int:
        with self._lock:
            return sum(batch.size for batch in self._batches.values())

    def full(self) -> bool:
        return self.size() >= self.max_bytes or self.took_the_reserve()

    def took_the_reserve(self) -> bool:
        """Whether the disk or store has less free space than is reserved for other data."""
        free = self.storage.free_bytes()
        return free is not None and free < self.min_free

    def done(self, batch_id: int) -> None:
        """The sink has the batch. Recorded before the files are removed: a crash in between delivers it again, and
        append_once skips it."""
        with self._lock:
            # The deliverer and a full queue may end the same batch; the mark must never move back.
            if batch_id > self._delivered:
                self.storage.write(_DELIVERED, str(batch_id).encode())
                self._delivered = batch_id
            batch = self._batches.pop(batch_id, None)
        if batch is not None:
            with suppress(StorageError):  # removed at the next start
                self.storage.delete(_manifest(batch_id))
            self._remove(batch.directory)

    def drop_oldest(self) -> int | None:
        """Drops the oldest batch, and returns which it was; None if the queue is empty. Only one thread calls it.

        If the store does not answer, the next call continues with the same batch.
        """
        with self._lock:
            if self._dropping is None and self._batches:
                self._dropping = self._batches.pop(min(self._batches))
        batch = self._dropping
        if batch is None:
            return None
        # On a full disk there is no room for the mark until the files are removed. The manifest goes first: without
        # its files it would be a damaged batch.
        self.storage.delete(_manifest(batch.id))
        self._remove(batch.directory)
        self.done(batch.id)
        self._dropping = None
        return batch.id

    def delivered(self) -> int:
        """The last batch that the sink has, or that was dropped; -1 if there is none."""
        return self._delivered

    def _last_delivered(self) -> int:
        try:
            return int(self.storage.read(_DELIVERED))
        except ObjectMissing:
            return -1

    def _stored(self, batch_id: int) -> StoredBatch:
        name = _manifest(batch_id)
        try:
            record: dict[str, Any] = json.loads(self.storage.read(name))
            files = tuple((str(file), int(size)) for file, size in record["files"])
            return StoredBatch(self.storage, batch_id, record["directory"], int(record["rows"]), files)
        except (ValueError, KeyError, TypeError) as error:
            raise SinkQueueDamaged(self.storage.uri(name), "it is no manifest") from error

    def _remove(self, directory: str) -> None:
        with suppress(StorageError):  # removed at the next start
            self.storage.delete(directory)


def _manifest(batch_id: int) -> str:
    return f"{batch_id:0{_DIGITS}d}{MANIFEST_SUFFIX}"


class Deliverer:
    """Delivers the batches of one queue, oldest first, with retries that end only when the queue is full.

    An error that a retry cannot solve stops it: its state is ``failed`` until ``start_again`` is called.
    """

    def __init__(
        self,
        session: SparkSession,
        plan: PipelinePlan,
        sink: Sink,
        queue: SinkQueue,
        context: RunContext,
        previous: Deliverer | None = None,
    ) -> None:
        """``previous``: the deliverer of the previous run. Its last delivery may still hang; this one waits for it."""
        self._session = session
        self._plan = plan
        self._sink = sink
        self._queue = queue
        self._context = context
        self._previous = previous
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
        waiting = self._queue.count()
        return "failing" if self._failing and waiting else "catching up" if waiting else "ok"

    def start(self) -> None:
        self._thread.start()

    def start_again(self) -> None:
        """Tries again after an error that a retry could not solve: the operator has removed its cause."""
        self._parked = False
        self._queue.arrived.set()

    def stop(
        self, *, drain_s: float = 0.0, timeout_s: float = STOP_S, is_interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """Ends the thread. With ``drain_s`` it may first deliver waiting batches, as long as the sink takes them.

        A delivery that takes longer than ``timeout_s`` is abandoned: its batch stays in the queue for the next start.
        Both waits end within about a second after ``is_interrupted`` has become true.
        """
        until = time.monotonic() + drain_s
        while self._queue.count() and not self._failing and time.monotonic() < until and self._thread.is_alive():
            if is_interrupted():
                break
            time.sleep(0.02)
        self._stop.set()
        self._queue.arrived.set()
        until = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < until and not is_interrupted():
            self._thread.join(0.1)
        self._thread.join(min(_INTERRUPTED_S, max(0.0, until - time.monotonic())))
        if self._thread.is_alive():
            log.warning(
                "pipeline %s: optional sink %s did not take a batch within %g s of the stop; the batch stays queued",
                *(self._plan.pipeline.name, self.name, timeout_s),
            )

    def _await_previous(self) -> None:
        previous, self._previous = self._previous, None
        while previous is not None and previous._thread.is_alive() and not self._stop.is_set():
            previous._thread.join(_IDLE_S)

    def _loop(self) -> None:
        self._await_previous()
        activate(self._session)
        backoff = self._plan.pipeline.spec.retry.backoff
        tries = 0
        while not self._stop.is_set():
            batch = None
            try:
                batch = None if self._parked else self._queue.oldest()
                if batch is not None:
                    self._deliver(batch)
                tries, self._failing = 0, self._parked
            except Exception as error:  # of any kind: nothing else would notice the end of this thread
                tries, self._failing = tries + 1, True
                # A batch that is gone was dropped meanwhile, because the queue is full: nothing is damaged then.
                final = is_fatal(error) and (batch is None or self._queue.holds(batch.id))
                self._tell_failure(error, tries, final=final)
                if not self._parked:
                    self._stop.wait(backoff.delay_ms(tries, random.random()) / 1000)  # noqa: S311  # no secret
                continue
            if batch is None:
                self._queue.arrived.wait(_IDLE_S)
                self._queue.arrived.clear()

    def _tell_failure(self, error: Exception, tries: int, *, final: bool) -> None:
        name, why = self._plan.pipeline.name, short(error)
        self._context.observer("pipeline.sink_error", pipeline=name, sink=self.name, error=why, attempt=tries)
        if final:
            self._parked = True
            log.error(
                "optional sink %s has failed: %s. Its batches wait in its queue; repair it, and start it again: "
                "POST /pipelines/%s/sinks/%s/start, or the whole pipeline",
                *(self.name, why, name, self.name),
            )
            self._context.observer("pipeline.sink_failed", pipeline=name, sink=self.name, error=why)
        else:
            log.warning("optional sink %s: its batches wait: %s", self.name, why)

    def _deliver(self, batch: StoredBatch) -> None:
        began = time.monotonic()
        context, name = self._context, self._plan.pipeline.name
        batch.verify()
        write = Write(context.application, batch.id, self.name, self._plan.delivery, context.secrets, context.fence)
        delivered = self._sink.deliver(self._session, batch, write)
        if delivered.rows != batch.rows:
            raise SinkQueueDamaged(
                batch.location, f"{batch.rows} rows were stored, and {delivered.rows} were delivered"
            )
        context.verify_lease()
        self._queue.done(batch.id)
        context.unready.pop(self.name, None)
        numbers = {**delivered.numbers(), "s": time.monotonic() - began}
        context.observer("pipeline.sink", pipeline=name, sink=self.name, batch=batch.id, **numbers)
        context.observer("pipeline.delivered", pipeline=name, sink=self.name, waiting=self._queue.count())
