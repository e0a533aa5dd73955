"""The open journal. In: units of effects. Out: nothing, once they are written; an error that says why they are not.

A change that could not be written stays outstanding: it is written before anything else, and until then ``trouble`` is
the text with which further writes are to be refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from millstream.engine.effects import Effect
from millstream.engine.journal.files import AppendFile, Files, took_some
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
    "MISCONF Errors writing to the AOF file: somebody has removed, replaced or cut it, a new file is being made."
)
_CLOSED: Final = "ERR the journal is closed: this broker is being shut down"


class JournalUnwritable(Exception):
    """The file system refused. ``text`` is the error reply for whoever wants to write."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    @property
    def unwritten(self) -> str:
        """The reply to whoever made the change that could not be written. Unlike what is refused from then on it is in
        memory, and in the file as soon as that can be written: it must not be taken for something that was not done."""
        _, _, why = self.text.partition(" ")
        return f"UNWRITTEN {why} This change is in memory, and the first to be written then."


def refusal(error: OSError) -> str:
    return (
        f"MISCONF Errors writing to the AOF file: {error.strerror}. "
        "Writes are refused until the journal can be written again: make room, or check the disk."
    )


class Journal:
    """Writes are serialised by the caller. ``sync`` may be called from another thread at any time."""

    def __init__(self, path: Path, files: Files, policy: Policy = "everysec") -> None:
        self.path = path
        self.policy: Policy = policy
        self.trouble: str | None = None
        self.sync_failed = False
        """What was written may be lost although it was not refused: only a new file from memory can be trusted."""
        self.size = 0
        self.base_size = 0
        """The size after the last rewrite, or at the start: growth is measured against it."""
        self._files = files
        self._file: AppendFile | None = None
        self._packer = Packer()
        self._chain = FIRST_CHAIN
        self._outstanding: list[bytes] = []
        self._untidy = False
        """A write was cut short, and its beginning could not be removed yet."""
        self._written = 0
        self._synced = 0
        self._sync_lock = threading.Lock()

    def open(self, *, end: int, chain: int, database: int) -> None:
        """Takes up a journal that was read up to ``end``, and cuts off what lies behind: a torn tail."""
        self._file = self._files.append_to(self.path)
        self.go_on_from(end=end, chain=chain, database=database)
        if not end:
            self._write(HEAD)
        self._file.sync()
        self._files.sync_directory(self.path.parent)
        self.base_size = self.size

    def go_on_from(self, *, end: int, chain: int, database: int) -> None:
        """The file counts up to ``end``, as it was read; what was outstanding does not count any more."""
        if self._file is None:
            raise JournalUnwritable(_CLOSED)
        self._file.truncate(end)
        self.size, self._chain, self._packer = end, chain, Packer(database)
        self._outstanding.clear()
        self._untidy = False

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(self, units: Iterable[Sequence[Effect]]) -> None:
        """Written when it returns, and on the disk under ``always``. JournalUnwritable: neither is certain."""
        payload = self._packer.pack(units)
        if payload:
            self._outstanding.append(payload)
        self.flush()

    def flush(self) -> None:
        """Writes what is outstanding. Where that failed before, this is the attempt that may end the trouble."""
        if self._file is None:
            raise JournalUnwritable(_CLOSED)
        if self.sync_failed:
            raise JournalUnwritable(self.trouble or _AFTER_FAILED_SYNC)
        try:
            while self._outstanding:
                self._write_frame(self._outstanding[0])
                del self._outstanding[0]
        except OSError as error:
            raise self._refuse(error) from error
        if self.policy == "always":
            self.sync()
        if not self.sync_failed:  # which another thread may have found out meanwhile
            self.trouble = None

    def _write_frame(self, payload: bytes) -> None:
        assert len(payload) <= MAX_PAYLOAD
        head, chain = seal(payload, self._chain)
        self._write(head + payload)
        self._chain = chain

    def _write(self, data: bytes) -> None:
        """All of it, or nothing of it: half a frame followed by a whole one could never be read again."""
        assert self._file is not None
        if self._untidy:
            self._file.truncate(self.size)
            self._untidy = False
        taken = self._file_write(data)
        while taken < len(data):
            taken += self._file_write(data[taken:])
        self.size += len(data)
        self._written += len(data)

    def _file_write(self, data: bytes) -> int:
        assert self._file is not None
        try:
            return took_some(self._file.write(data))
        except OSError:
            self._untidy = True
            try:
                self._file.truncate(self.size)
                self._untidy = False
            except OSError:
                pass  # tried again before the next write
            raise

    def _refuse(self, error: OSError) -> JournalUnwritable:
        if self.trouble is None:
            logger.error("the journal %s cannot be written: %s. Writes are refused.", self.path, error.strerror)
        self.trouble = refusal(error)
        return JournalUnwritable(self.trouble)

    # --- the disk ---------------------------------------------------------------------------------------------------

    @property
    def unsynced(self) -> bool:
        return self._synced < self._written

    def sync(self) -> None:
        """On the disk when it returns: everything that was written before the call. Callers share one fsync."""
        wanted = self._written
        with self._sync_lock:
            if self._synced >= wanted:
                return
            # An error is reported once: the next fsync would succeed, whatever became of the bytes.
            if self.sync_failed:
                raise JournalUnwritable(self.trouble or _AFTER_FAILED_SYNC)
            if self._file is None:
                raise JournalUnwritable(_CLOSED)
            reached = self._written
            try:
                self._file.sync()
            except OSError as error:
                # The kernel may have dropped what it could not write, and the next fsync would then claim success.
                refused = self._refuse(error)
                self.sync_failed = True
                raise refused from error
            self._synced = reached

    def check_place(self) -> None:
        """Whether what we write is what a restart will read. Nobody may be writing meanwhile."""
        if self._file is None or self.sync_failed or self._file.is_at(self.path, self.size):
            return
        logger.error("the journal %s was removed, replaced or cut by somebody else. Writes are refused.", self.path)
        self.trouble, self.sync_failed = _OUT_OF_PLACE, True

    # --- rewriting --------------------------------------------------------------------------------------------------

    def switch(self, replacement: Replacement) -> None:
        """From now on the rewritten file is the journal. It must hold all that this one holds, what is outstanding
        included, and be on the disk. If this raises an OSError, the old one goes on.

        JournalUnwritable: the new one has its place, but may lose it in a power cut. What would be written to it until
        then would be lost too, so writes are refused until another new file has a place that lasts."""
        unlasting: JournalUnwritable | None = None
        with self._sync_lock:
            self._files.replace(replacement.path, self.path)
            old, self._file = self._file, replacement.file
            self._outstanding.clear()
            self.sync_failed, self.trouble = False, None
            self.size = self.base_size = replacement.size
            self._chain = replacement.chain
            self._packer = Packer(replacement.database)
            self._synced = self._written
            self._untidy = False
            try:
                self._files.sync_directory(self.path.parent)
            except OSError as error:
                unlasting = self._refuse(error)
                self.sync_failed = True
        if old is not None:
            old.close()
        if unlasting is not None:
            raise unlasting

    @property
    def outstanding(self) -> bool:
        return bool(self._outstanding)

    @property
    def chain(self) -> int:
        """The CRC of the last frame."""
        return self._chain

    @property
    def database(self) -> int:
        """The database that the next effect finds selected."""
        return self._packer.database

    def close(self) -> None:
        """Writes and syncs what is outstanding, whatever the policy. The last word: errors are raised."""
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
        """In a forked child: closes its copy of the file, and writes nothing."""
        file, self._file = self._file, None
        self._outstanding.clear()
        if file is not None:
            file.close()
