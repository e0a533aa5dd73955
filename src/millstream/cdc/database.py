"""What a database must bring to be followed, and the one thread that reads its log ahead into the spool: planner,
reader, spool and frame are shared.

An implementation holds options alone, so that it travels to the tasks as a pickle; connections are made where they are
used. It raises SourceRefused, SourceUnreachable and PositionLost, each in words that say what to do. The session stays
open over all batches, stops reading while the spool is full, and connects again after a fault that may pass.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import random
from typing import Any, Protocol

import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import SourceUnreachable
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions
from millstream.cdc.segments import Numbers, Segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable
from millstream.cdc.spool import Count, LogSpool
from millstream.model import Backoff

log = logging.getLogger("millstream.cdc")

TICK_S = 0.2
STOP_S = 30.0
"""How long a session may take to end: a connection that is being made knows nothing of it."""
_RECONNECT = Backoff(initial_ms=200, max_ms=5000)


class ChangeSession(threading.Thread, ABC):
    """``shown`` is the database's address, without secrets.

    Whatever ends it for good is in ``spool.error``; a fault that may pass is in ``trouble`` until it has passed.
    """

    def __init__(self, spool: LogSpool, shown: str) -> None:
        super().__init__(name="millstream-cdc", daemon=True)
        self._spool = spool
        self._shown = shown
        self._ending = threading.Event()
        self._last_contact = time.monotonic()
        self.trouble: str | None = None

    @abstractmethod
    def acknowledge(self, position: int) -> None:
        """Everything up to here is finished, and may be forgotten by the server."""

    @abstractmethod
    def _stream(self) -> None:
        """Connects, calls ``_connected``, and spools until the session is to end. Raises SourceUnreachable or OSError
        for what may pass; everything else ends the session for good."""

    def stop(self) -> None:
        """Waits for the thread's end, though not for ever: one that hangs in a call to the database or the disk is told
        of in the log, and touches no file any more when that call returns. Idempotent."""
        self._ending.set()
        if self.is_alive():
            self.join(STOP_S)
        self._spool.close()
        if self.is_alive():
            log.warning("the session with %s has not ended in %g s: it is left behind", self._shown, STOP_S)

    def run(self) -> None:
        attempt = 0
        while not self._ending.is_set():
            try:
                self._stream()
            except (SourceUnreachable, OSError) as error:
                attempt = 1 if self.trouble is None else attempt + 1
                if self.trouble is None:
                    log.warning("the log of %s is interrupted: %s", self._shown, error)
                self.trouble = str(error)
                self._ending.wait(_RECONNECT.delay_ms(attempt, random()) / 1000)  # noqa: S311  # jitter
            except BaseException as error:
                with self._spool.lock:
                    self._spool.error = error
                    self._spool.lock.notify_all()
                return

    def _connected(self) -> None:
        self._heard()
        if self.trouble is not None:
            log.warning("the log of %s goes on", self._shown)
            self.trouble = None

    def _heard(self) -> None:
        self._last_contact = time.monotonic()

    def _must_have_heard(self, within_s: float) -> None:
        if time.monotonic() - self._last_contact > within_s:
            raise SourceUnreachable(f"{self._shown} has been silent for too long. It is tried again.")

    def _wait_for_room(self) -> bool:
        """Between two transactions: whether the spool was full. What the server has to send stays with it."""
        with self._spool.lock:
            full = self._spool.full()
            if full:
                self._spool.lock.wait(TICK_S)
        if full:
            self._heard()
        return full


class ChangeDatabase(Protocol):
    @property
    def options(self) -> FollowOptions: ...

    @property
    def count(self) -> Count | None:
        """How changes in messages are counted; None: a message is a change."""

    # --- on the driver ----------------------------------------------------------------------------------------------

    def begin(self) -> ChangeOffset:
        """Looks at the database, makes what was asked for, and answers where its log begins for us. Refuses before
        anything is made."""

    def resume(self, start: ChangeOffset) -> list[str]:
        """Whether what follows ``start`` can be had, on the same server; the full names of the tables that are
        followed."""

    def session(self, spool: LogSpool, start: ChangeOffset, met: Callable[[str], None]) -> ChangeSession:
        """Not started yet. ``met`` is told the full name of a followed table before any change of it is spooled."""

    def log_end(self) -> int:
        """How far the log is written now."""

    def mark(self, files: Sequence[Path], position: int) -> str:
        """What the log calls the transaction that ends at ``position``, so that it is known again; may be empty.
        ``files`` hold it."""

    def cut_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        """How tables (None: all that are followed) are cut into chunks: ``schema``, ``table``, ``key``, ``bounds``,
        and what else ``read_chunk`` needs. Each chunk must have seen the transaction in ``must_see``."""

    # --- in the tasks -----------------------------------------------------------------------------------------------

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        """Reads a chunk in a transaction of its own and writes it as a segment, with what it saw in the facts
        ``snapshot``, ``position`` and ``ts_ms``."""

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        """Which chunk each key belongs to, by the server's own order."""

    def decoding(self) -> Decoding:
        """How changes are told, for the lane that takes all of them."""

    def decode_changes(self, segment: Segment, how: Decoding) -> pa.RecordBatch: ...

    def decode_chunk(self, segment: Segment, how: Decoding, name: str) -> pa.RecordBatch | None:
        """None: the table was dropped before the chunk was read."""
