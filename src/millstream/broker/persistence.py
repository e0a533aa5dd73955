"""The directory of a durable engine: locking, loading, syncing and rewriting the journal. ``Turn`` writes to it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from millstream.engine import Engine
from millstream.engine.effects import Effect, snapshot
from millstream.engine.journal.files import DirectoryLock, Files
from millstream.engine.journal.frames import load_journal
from millstream.engine.journal.journal import JOURNAL_NAME, POLICIES, REWRITE_NAME, Journal, JournalUnwritable, Policy
from millstream.engine.journal.rewrite import Replacement, Rewrite, RewriteFailed
from millstream.errors import JournalCorrupt, JournalNotWritten, MillstreamError
from millstream.model import Clock
from millstream.wire import ErrorReply

logger = logging.getLogger("millstream.journal")

SYNC_INTERVAL_MS: Final = 1000
RETRY_INTERVAL_MS: Final = 1000
LOCATION_CHECK_INTERVAL_MS: Final = 1000
REWRITE_RETRY_MS: Final = 60_000
"""After a failed rewrite, the next automatic rewrite waits this long."""


class Persistence:
    """The journal of one engine, and its maintenance."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        *,
        policy: Policy,
        clock: Clock,
        files: Files,
        rewrite_min_bytes: int,
    ) -> None:
        self.directory = directory
        self.units: list[list[Effect]] = []
        """The changes of the current turn so far."""
        self._unwritten: JournalUnwritable | None = None
        self.interrupted = False
        """A turn was interrupted at an unknown point: ``recover`` must run before anything else."""
        self._open = True
        self.rewrite_min_bytes = rewrite_min_bytes
        self.rewrite_growth_percent = 100
        self.load_seconds = 0.0
        self.on = True
        """False after ``CONFIG SET appendonly no``: changes are not recorded."""
        self._engine = engine
        self._clock = clock
        self._files = files
        self._rewrite: Rewrite | None = None
        self._housekeeping = threading.Lock()
        """Held during housekeeping, so that ``close`` does not close files that are in use."""
        self._rewrite_failed = False
        self._no_rewrite_before_ms = 0
        self._last_sync_ms = self._last_retry_ms = self._last_check_ms = clock.monotonic_ms()
        self._lock = DirectoryLock(directory)
        self._lock.take()
        try:
            self.journal = Journal(directory / JOURNAL_NAME, files, policy)
            files.remove(directory / REWRITE_NAME)
            self._load()
            engine.hooks.rewrite_journal = self._rewrite_on_request
            engine.hooks.reload_journal = self._reload
            engine.hooks.persistence = self._info
            engine.config.set_initial("auto-aof-rewrite-min-size", str(rewrite_min_bytes))
            # Writers read CONFIG GET to learn which durability they can ask for.
            for name, value in (("appendonly", "yes"), ("appendfsync", policy), ("dir", str(directory))):
                engine.config.set_initial(name, value)
        except BaseException:  # also after Ctrl-C: the directory must not stay locked in this process
            self._lock.release()
            raise

    def _load(self) -> None:
        began = time.perf_counter()
        try:
            loaded = load_journal(self._engine, self.journal.path, self._files, now_ms=self._clock.now_ms())
        except OSError as error:
            raise MillstreamError(
                f"the journal {self.journal.path} cannot be read: {error.strerror or error}. It must be a file that "
                "this user can read and write."
            ) from error
        try:
            self.journal.open(end=loaded.end, chain=loaded.chain, database=loaded.database)
        except (OSError, JournalUnwritable) as error:
            raise MillstreamError(
                f"the journal {self.journal.path} cannot be written: {error}. Free disk space, or check the disk."
            ) from error
        self.load_seconds = time.perf_counter() - began

    def write_units(self) -> None:
        """Writes the changes of the turn to the journal. Raises JournalUnwritable if some could not be written."""
        units, self.units = self.units, []
        unwritten, self._unwritten = self._unwritten, None
        if units:
            self.journal.append(units)
        if unwritten is not None:
            raise unwritten

    def recover(self) -> None:
        """Recovers after an interrupt (Ctrl-C, a time limit) in the middle of a turn.

        It is unknown which changes of the turn are in memory and which are in the file. As after a crash, the journal
        decides: it is loaded again, complete turns only. Clients stay connected. Runs under the lock; if it is
        interrupted, the next turn runs it again.
        """
        journal = self.journal
        self._engine.discard_interrupted()
        self.units, self._unwritten = [], None
        if self.on and not journal.sync_failed:  # otherwise only the data in memory is reliable
            logger.warning("a command was interrupted; reloading the journal %s", journal.path)
            self._load_in_place()
        self.interrupted = False

    def _load_in_place(self) -> None:
        engine = self._engine
        for database in engine.databases:
            database.values.clear()
            database.expires.clear()
        loaded = load_journal(engine, self.journal.path, self._files, now_ms=self._clock.now_ms())
        self.journal.reset_to(end=loaded.end, chain=loaded.chain, database=loaded.database)
        engine.memory.recount()

    # --- housekeeping -----------------------------------------------------------------------------------------------

    def run_housekeeping(self, lock: AbstractContextManager[Any]) -> None:
        """Syncs, retries and rewrites the journal when due. Takes ``lock``, which keeps clients from writing, only
        briefly.
        """
        with self._housekeeping:
            if self._open:
                self._maintain(lock)

    def _maintain(self, lock: AbstractContextManager[Any]) -> None:
        now_ms = self._clock.monotonic_ms()
        if self.on and now_ms - self._last_check_ms >= LOCATION_CHECK_INTERVAL_MS:
            self._last_check_ms = now_ms
            with lock:
                self.journal.check_place()
        if self.journal.trouble is not None and now_ms - self._last_retry_ms >= RETRY_INTERVAL_MS:
            self._last_retry_ms = now_ms
            with lock:
                self._recover_journal()
        if self.journal.policy == "everysec" and now_ms - self._last_sync_ms >= SYNC_INTERVAL_MS:
            self._last_sync_ms = now_ms
            self._sync()
        self._rewrite_if_grown(now_ms, lock)

    def _sync(self) -> None:
        try:
            if self.journal.unsynced:
                self.journal.sync()
        except JournalUnwritable:
            pass  # logged and kept in ``journal.trouble``: writes are rejected from now on

    def _recover_journal(self) -> None:
        """Tries to write again after a failure. After a failed fsync it writes a new file from memory, because the
        contents of the old file are unknown.
        """
        try:
            if self.journal.sync_failed:
                self._abandon_rewrite()
                self._replace_journal()
            else:
                self.journal.flush()
            logger.warning("the journal %s is writable again", self.journal.path)
        except (JournalUnwritable, OSError):
            pass  # writes stay rejected until the next try, after RETRY_INTERVAL_MS

    def _replace_journal(self) -> None:
        if not self._lock.holds():
            raise OSError(errno.ESTALE, f"the directory {self.directory} is not the one that was opened")
        replacement = Replacement(self.directory / REWRITE_NAME, self._files)
        try:
            replacement.add(snapshot(self._engine))
            replacement.sync()
            self.journal.switch(replacement)
        except OSError:
            replacement.discard()
            raise

    # --- rewriting --------------------------------------------------------------------------------------------------

    def _has_grown(self) -> bool:
        size, base = self.journal.size, max(self.journal.base_size, 1)
        return (
            self.rewrite_growth_percent > 0
            and size >= self.rewrite_min_bytes
            and (size - base) * 100 >= base * self.rewrite_growth_percent
        )

    def _rewrite_if_grown(self, now_ms: int, lock: AbstractContextManager[Any]) -> None:
        if self.journal.trouble is not None:
            return
        try:
            if self._rewrite is not None:
                self._advance(self._rewrite, lock)
            elif self._has_grown() and now_ms >= self._no_rewrite_before_ms:
                with lock:
                    if self._rewrite is None:  # BGREWRITEAOF may have started one meanwhile
                        self._rewrite = Rewrite(self.journal, self._files)
        except (RewriteFailed, JournalUnwritable, OSError) as error:
            logger.warning("the journal %s could not be rewritten: %s", self.journal.path, error)
            self._rewrite_failed = True
            self._no_rewrite_before_ms = now_ms + REWRITE_RETRY_MS
            self._abandon_rewrite()

    def _advance(self, rewrite: Rewrite, lock: AbstractContextManager[Any]) -> None:
        if not rewrite.catch_up():
            return
        with lock:
            if self.journal.outstanding:
                return
            rewrite.finish()
            self._rewrite, self._rewrite_failed = None, False
        logger.info("the journal %s was rewritten: %d bytes", self.journal.path, self.journal.size)

    def _abandon_rewrite(self) -> None:
        rewrite, self._rewrite = self._rewrite, None
        if rewrite is not None:
            rewrite.abandon()

    # --- called by the engine ---------------------------------------------------------------------------------------

    def _rewrite_on_request(self) -> None:
        """BGREWRITEAOF. Runs under the lock."""
        if not self.on:
            raise ErrorReply("ERR There is nothing to rewrite while appendonly is off. Turn it on first.")
        if self._rewrite is not None:
            raise ErrorReply("ERR Background append only file rewriting already in progress")
        self._write_units()
        try:
            self._rewrite = Rewrite(self.journal, self._files)
        except OSError as error:
            raise ErrorReply(f"ERR Can't rewrite the append only file: {error.strerror}") from error

    def _reload(self) -> None:
        """DEBUG LOADAOF. Runs under the lock. If the journal cannot be read, the engine keeps its data."""
        self._write_units()
        try:
            load_journal(Engine(), self.journal.path, self._files, now_ms=self._clock.now_ms())
        except (JournalCorrupt, OSError) as error:
            logger.error("DEBUG LOADAOF failed, the data in memory is kept: %s", error)
            raise ErrorReply("ERR Error trying to load the AOF files, check server logs.") from error
        self._load_in_place()

    def _write_units(self) -> None:
        """Writes in the middle of a turn. If it fails, the earlier replies of the turn become errors too."""
        self.units += self._engine.take_units()
        try:
            self.write_units()
        except JournalUnwritable as error:
            self._unwritten = error
            raise ErrorReply(error.text) from error

    def _turn_off(self) -> None:
        """Syncs the journal and stops recording: a restart restores the state of this moment."""
        self._write_units()
        try:
            self.journal.sync()
        except JournalUnwritable as error:
            raise ErrorReply(error.text) from error
        self._abandon_rewrite()
        self.on = self._engine.recording = False
        logger.warning("the journal %s is off: changes from now on are lost at a restart", self.journal.path)

    def _turn_on(self) -> None:
        """Replaces the old journal by a new one, written from memory, before any further change is confirmed."""
        try:
            self._replace_journal()
        except (JournalUnwritable, OSError) as error:
            logger.error("the journal %s could not be turned on: %s", self.journal.path, error)
            raise ErrorReply(
                "ERR CONFIG SET failed (possibly related to argument 'appendonly') - Unable to turn on AOF. "
                "Check server logs."
            ) from error
        self.on = self._engine.recording = True

    def configure(self, name: str, value: str) -> None:
        """Applies CONFIG SET of the journal's settings. Runs under the lock."""
        if name == "appendonly" and self.on != (value == "yes"):
            (self._turn_off if self.on else self._turn_on)()
        elif name == "appendfsync":
            assert value in POLICIES
            self.journal.policy = value  # type: ignore[assignment]  # checked in the line above
        elif name == "auto-aof-rewrite-percentage":
            self.rewrite_growth_percent = int(value)
        elif name == "auto-aof-rewrite-min-size":
            self.rewrite_min_bytes = int(value)

    def _info(self) -> Mapping[str, object]:
        failed = self.journal.trouble is not None
        return {
            "loading": 0,
            "aof_enabled": int(self.on),
            "aof_rewrite_in_progress": int(self._rewrite is not None),
            "aof_last_bgrewrite_status": "err" if self._rewrite_failed else "ok",
            "aof_last_write_status": "err" if failed else "ok",
            "aof_current_size": self.journal.size,
            "aof_base_size": self.journal.base_size,
        }

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, lock: AbstractContextManager[Any]) -> None:
        """Closes the journal and releases the directory, also if it raises JournalNotWritten.

        It first waits for housekeeping, which may need ``lock``. Then it takes the lock, so that a client that still
        waits for it cannot write any more.
        """
        with self._housekeeping:
            self._open = False
        with lock:
            try:
                self._abandon_rewrite()
                if self.interrupted:
                    self.recover()
                if self.on:
                    self.journal.check_place()  # the last check of housekeeping may be a second old
                    if self.journal.sync_failed:
                        self._recover_journal()
                self.journal.close()
            except (JournalUnwritable, JournalCorrupt, OSError) as error:
                raise JournalNotWritten(
                    f"the journal {self.journal.path} was closed, but some changes could not be written to it: {error}",
                    path=str(self.journal.path),
                ) from error
            finally:
                self._lock.release()

    def disown(self) -> None:
        """In a forked child: releases the files without changing what the parent still uses."""
        self._open = False
        self._housekeeping = (
            threading.Lock()
        )  # the housekeeping thread, which exists only in the parent, may have held it
        self._rewrite = None
        self.journal.abandon()
        self._lock.release()
