"""The open journal: appends units of effects, and raises JournalUnwritable if they cannot be written.

A change that could not be written stays outstanding and is written before any later change. Until then ``trouble`` is
the error text with which further writes are rejected.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from millstream.engine.effects import Effect
from millstream.engine.journal.files import AppendFile, Files, require_progress
from millstream.engine.journal.frames import FIRST_CHAIN, HEAD, MAX_PAYLOAD, Packer, seal

if TYPE_CHECKING:
    from millstream.engine.journal.rewrite import Replacement

logger = logging.getLogger("millstream.journal")

Policy = Literal["always", "everysec", "no"]
POLICIES: Final = ("always", "everysec", "no")

JOURNAL_NAME: Final = "journal.aof"
REWRITE_NAME: Final = "journal.aof.rewrite"


_AFTER_FAILED_SYNC: Final = "MISCONF Errors writing to the AOF file: an fsync failed, a new file is being made."
_OUT_OF_PLACE: Final = (
    "MISCONF Errors writing to the AOF file: it was removed, replaced or truncated, a new file is being made."
)
_CLOSED: Final = "ERR the journal is closed: this broker is being shut down"


class JournalUnwritable(Exception):
    """The file system rejected a write. ``text`` is the error reply for clients that want to write."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @property
    def unwritten(self) -> str:
        """The reply to the client whose change could not be written.

        Unlike writes that are rejected later, this change is in memory, and will be written as soon as possible. The
        client must not assume that it failed.
        """
        _, _, reason = self.text.partition(" ")
        return f"UNWRITTEN {reason} This change is in memory, and the first to be written then."


def write_error_text(error: OSError) -> str:
    return (
        f"MISCONF Errors writing to the AOF file: {error.strerror}. "
        "Writes are refused until the journal can be written again: free disk space, or check the disk."
    )


class Journal:
    """The journal file. The caller serialises writes. ``sync`` may be called from another thread at any time."""

    def __init__(self, path: Path, files: Files, policy: Policy = "everysec") -> None:
        self.path = path
        self.policy: Policy = policy
        self.trouble: str | None = None
        self.sync_failed = False
        """An fsync failed, so written data may be lost. Only a new file, made from memory, is reliable."""
        self.size = 0
        self.base_size = 0
        """The size after the last rewrite or at the start, from which growth is measured."""
        self._files = files
        self._file: AppendFile | None = None
        self._packer = Packer()
        self._chain = FIRST_CHAIN
        self._outstanding: list[bytes] = []
        self._has_partial_frame = False
        """A write failed half-way, and the partial frame could not be removed yet."""
        self._written = 0
        self._synced = 0
        self._sync_lock = threading.Lock()

    def open(self, *, end: int, chain: int, database: int) -> None:
        """Opens a journal that was read up to ``end``, and truncates an incomplete frame after it."""
        self._file = self._files.append_to(self.path)
        self.reset_to(end=end, chain=chain, database=database)
        if not end:
            self._write(HEAD)
        self._file.sync()
        self._files.sync_directory(self.path.parent)
        self.base_size = self.size

    def reset_to(self, *, end: int, chain: int, database: int) -> None:
        """Truncates the file to ``end``, up to which it was read, and discards outstanding changes."""
        if self._file is None:
            raise JournalUnwritable(_CLOSED)
        self._file.truncate(end)
        self.size, self._chain, self._packer = end, chain, Packer(database)
        self._outstanding.clear()
        self._has_partial_frame = False

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self, units: Iterable[Sequence[Effect]]) -> None:
        """Writes the effects; under ``always`` they are on the disk when it returns. JournalUnwritable: maybe not."""
        payload = self._packer.pack(units)
        if payload:
            self._outstanding.append(payload)
        self.flush()

    def flush(self) -> None:
        """Writes the outstanding changes. Clears ``trouble`` if an earlier write failed and this one succeeds."""
        if self._file is None:
            raise JournalUnwritable(_CLOSED)
        if self.sync_failed:
            raise JournalUnwritable(self.trouble or _AFTER_FAILED_SYNC)
        try:
            while self._outstanding:
                self._write_frame(self._outstanding[0])
                del self._outstanding[0]
        except OSError as error:
            raise self._reject(error) from error
        if self.policy == "always":
            self.sync()
        if not self.sync_failed:  # another thread may have set it during the write
            self.trouble = None

    def _write_frame(self, payload: bytes) -> None:
        assert len(payload) <= MAX_PAYLOAD
        head, chain = seal(payload, self._chain)
        self._write(head + payload)
        self._chain = chain

    def _write(self, data: bytes) -> None:
        """Writes all of the data or nothing: a partial frame before a complete one would make the file unreadable."""
        assert self._file is not None
        if self._has_partial_frame:
            self._file.truncate(self.size)
            self._has_partial_frame = False
        written = self._file_write(data)
        while written < len(data):
            written += self._file_write(data[written:])
        self.size += len(data)
        self._written += len(data)

    def _file_write(self, data: bytes) -> int:
        assert self._file is not None
        try:
            return require_progress(self._file.write(data))
        except OSError:
            self._has_partial_frame = True
            try:
                self._file.truncate(self.size)
                self._has_partial_frame = False
            except OSError:
                pass  # retried before the next write
            raise

    def _reject(self, error: OSError) -> JournalUnwritable:
        if self.trouble is None:
            logger.error("the journal %s cannot be written: %s. Writes are refused.", self.path, error.strerror)
        self.trouble = write_error_text(error)
        return JournalUnwritable(self.trouble)

    # --- the disk ---------------------------------------------------------------------------------------------------

    @property
    def unsynced(self) -> bool:
        return self._synced < self._written

    def sync(self) -> None:
        """Returns when all data written before the call is on the disk. Concurrent callers share one fsync."""
        target = self._written
        with self._sync_lock:
            if self._synced >= target:
                return
            # The kernel reports an error only once: the next fsync would succeed even if data was lost.
            if self.sync_failed:
                raise JournalUnwritable(self.trouble or _AFTER_FAILED_SYNC)
            if self._file is None:
                raise JournalUnwritable(_CLOSED)
            reached = self._written
            try:
                self._file.sync()
            except OSError as error:
                # The kernel may have dropped the pages that it could not write. The next fsync would then succeed.
                refused = self._reject(error)
                self.sync_failed = True
                raise refused from error
            self._synced = reached

    def check_place(self) -> None:
        """Rejects writes if the path is no longer this file, which a restart would read. No write may be running."""
        if self._file is None or self.sync_failed or self._file.is_at(self.path, self.size):
            return
        logger.error(
            "the journal %s was removed, replaced or truncated by another process. Writes are refused.", self.path
        )
        self.trouble, self.sync_failed = _OUT_OF_PLACE, True

    # --- rewriting --------------------------------------------------------------------------------------------------

    def switch(self, replacement: Replacement) -> None:
        """Makes the rewritten file the journal.

        It must contain everything that this one contains, including outstanding changes, and be on the disk. If this
        raises an OSError, the old journal stays in use.

        JournalUnwritable: the file was renamed, but a power failure may undo the rename and lose all later writes. So
        writes are rejected until another new file has been renamed durably.
        """
        not_durable: JournalUnwritable | None = None
        with self._sync_lock:
            self._files.replace(replacement.path, self.path)
            old, self._file = self._file, replacement.file
            self._outstanding.clear()
            self.sync_failed, self.trouble = False, None
            self.size = self.base_size = replacement.size
            self._chain = replacement.chain
            self._packer = Packer(replacement.database)
            self._synced = self._written
            self._has_partial_frame = False
            try:
                self._files.sync_directory(self.path.parent)
            except OSError as error:
                not_durable = self._reject(error)
                self.sync_failed = True
        if old is not None:
            old.close()
        if not_durable is not None:
            raise not_durable

    @property
    def outstanding(self) -> bool:
        return bool(self._outstanding)

    @property
    def chain(self) -> int:
        """The CRC of the last frame, with which the next one continues."""
        return self._chain

    @property
    def database(self) -> int:
        """The database that is selected at the end of the journal."""
        return self._packer.database

    def close(self) -> None:
        """Writes and syncs the outstanding changes, under every policy. Raises errors."""
        if self._file is None:
            return
        try:
            self.flush()
            self.sync()
        finally:
            with self._sync_lock:
                file, self._file = self._file, None
                file.close()

    def abandon(self) -> None:
        """Closes the file without writing. For a forked child process."""
        file, self._file = self._file, None
        self._outstanding.clear()
        if file is not None:
            file.close()
