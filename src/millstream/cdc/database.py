"""The interface of a database (``ChangeDatabase``), and the thread that reads its change log (``ChangeSession``).

Planner, reader, read-ahead log and decoding are shared by all databases.

An implementation of ``ChangeDatabase`` holds only options, because it is pickled and sent to the tasks; connections are
opened where they are used. It raises SourceRefused, SourceUnreachable and PositionLost, and each message says what to
do. The session stays connected across batches, stops reading while the read-ahead log is full, and reconnects after a
transient error.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from random import random
from typing import Any, Protocol

import pyarrow as pa

from millstream.cdc.decoding import Decoding
from millstream.cdc.errors import SourceUnreachable
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.options import FollowOptions
from millstream.cdc.read_ahead import ChangeCounter, ReadAheadLog
from millstream.cdc.segments import Numbers, Segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable
from millstream.model import Backoff

log = logging.getLogger("millstream.cdc")

POLL_S = 0.2
STOP_S = 30.0
"""Maximum wait for a session's thread. The thread cannot be interrupted while it opens a connection."""
_RECONNECT = Backoff(initial_ms=200, max_ms=5000)


TableCallback = Callable[[str, str | None], None]
"""Called with the full name of a followed table before a change of it is written to the read-ahead log. The second
argument is None, or a description of a table change in the log after which the table needs a new snapshot."""


class ChangeSession(threading.Thread, ABC):
    """Reads the change log of a database into the read-ahead log, in a thread of its own.

    ``display_address`` is the database's address without secrets. A permanent error is stored in ``read_ahead.error``
    and ends the thread. A transient error is stored in ``connection_error`` until the connection works again.
    """

    def __init__(self, read_ahead: ReadAheadLog, display_address: str) -> None:
        super().__init__(name="millstream-cdc", daemon=True)
        self._read_ahead = read_ahead
        self._display_address = display_address
        self._ending = threading.Event()
        self._last_contact = time.monotonic()
        self.connection_error: str | None = None

    @abstractmethod
    def acknowledge(self, position: int) -> None:
        """All changes up to ``position`` are in finished batches. The server may discard its log up to there."""

    @abstractmethod
    def _stream(self) -> None:
        """Connects, calls ``_connected``, and fills the read-ahead log until the session is stopped. Raises
        SourceUnreachable or OSError for transient errors; every other exception ends the session."""

    def stop(self) -> None:
        """Stops the thread and waits at most ``STOP_S`` for it. A thread that hangs in a call to the database or the
        disk is reported in the log; it does not change files after that call returns. Idempotent."""
        self._ending.set()
        if self.is_alive():
            self.join(STOP_S)
        self._read_ahead.close()
        if self.is_alive():
            log.warning(
                "the session with %s did not end within %g s; it can no longer change files",
                self._display_address,
                STOP_S,
            )

    def run(self) -> None:
        attempt = 0
        while not self._ending.is_set():
            try:
                self._stream()
            except (SourceUnreachable, OSError) as error:
                attempt = 1 if self.connection_error is None else attempt + 1
                if self.connection_error is None:
                    log.warning(
                        "lost the connection to the change log of %s; reconnecting: %s", self._display_address, error
                    )
                self.connection_error = str(error)
                self._ending.wait(_RECONNECT.delay_ms(attempt, random()) / 1000)  # noqa: S311  # jitter
            except BaseException as error:  # raised in the thread that waits for changes
                with self._read_ahead.lock:
                    self._read_ahead.error = error
                    self._read_ahead.lock.notify_all()
                return

    def _connected(self) -> None:
        self._record_contact()
        if self.connection_error is not None:
            log.warning("reconnected to the change log of %s", self._display_address)
            self.connection_error = None

    def _record_contact(self) -> None:
        self._last_contact = time.monotonic()

    def _check_contact(self, within_s: float) -> None:
        if time.monotonic() - self._last_contact > within_s:
            raise SourceUnreachable(f"{self._display_address} sent nothing for {within_s:g} s. Reconnecting.")

    def _wait_for_capacity(self) -> bool:
        """Returns True if the read-ahead log is full, after a short wait. Called between transactions; while it is
        full, the server keeps its log."""
        with self._read_ahead.lock:
            full = self._read_ahead.full()
            if full:
                self._read_ahead.lock.wait(POLL_S)
        if full:
            self._record_contact()
        return full


class ChangeDatabase(Protocol):
    """One database, as the planner (on the driver) and the reader (in the tasks) use it."""

    @property
    def options(self) -> FollowOptions: ...

    @property
    def change_counter(self) -> ChangeCounter | None:
        """Counts the changes in messages; None if every message is one change."""

    # --- on the driver ----------------------------------------------------------------------------------------------

    def begin(self) -> ChangeOffset:
        """Checks the database, creates what the options ask for, and returns the first position to read from. All
        checks run before anything is created."""

    def resume(self, start: ChangeOffset) -> list[str]:
        """Checks that this is the same server and that it still has the log after ``start``. Returns the full names of
        the followed tables. Changes nothing."""

    def include_new_tables(self) -> None:
        """Makes the server log changes of followed tables that it does not log yet, if the options ask for that."""

    def identities(self, recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The identity of each followed table by its full name, as JSON for ``identity.difference``. For a table of
        ``recorded`` that is no longer followed, the result says why."""

    def session(
        self,
        read_ahead: ReadAheadLog,
        start: ChangeOffset,
        on_table: TableCallback,
        recorded: Callable[[], Mapping[str, Any]],
    ) -> ChangeSession:
        """A session that is not started yet. ``recorded`` returns the recorded table identities by full name."""

    def log_end(self) -> int:
        """The current end of the server's log."""

    def gtids(self, files: Sequence[Path], position: int) -> str:
        """The GTID of the transaction that ends at ``position``, which is in ``files``. Empty if the database does not
        need it to verify a position."""

    def split_tables(self, names: Collection[str] | None, must_see: Mapping[str, int]) -> list[dict[str, Any]]:
        """Splits tables (None: all followed tables) into chunks: ``schema``, ``table``, ``key``, ``bounds``, and what
        else ``read_chunk`` needs. The snapshot of each chunk must include the transaction in ``must_see``."""

    # --- in the tasks -----------------------------------------------------------------------------------------------

    def read_chunk(self, path: Path, chunk: ChunkPlan) -> None:
        """Reads a chunk in a transaction of its own and writes it as a segment. The metadata ``snapshot``,
        ``position`` and ``ts_ms`` say which transactions were visible."""

    def locate(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
        """The chunk that each key belongs to, by the server's sort order."""

    def decoding(self) -> Decoding:
        """The decoding options for all changes in one partition."""

    def decode_changes(self, segment: Segment, decoding: Decoding) -> pa.RecordBatch: ...

    def decode_chunk(self, segment: Segment, decoding: Decoding, name: str, first: int = 0) -> Iterator[pa.RecordBatch]:
        """The rows of a chunk, or of a part of it that starts with row ``first``. Yields nothing if the table was
        dropped before the chunk was read."""
