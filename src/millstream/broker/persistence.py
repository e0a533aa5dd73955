"""An engine's directory: locked, loaded, and kept in order. The journal is written by turns; this is all the rest."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from millstream.engine import (
    JOURNAL_NAME,
    POLICIES,
    REWRITE_NAME,
    DirectoryLock,
    Effect,
    Engine,
    Files,
    Journal,
    JournalUnwritable,
    Policy,
    Replacement,
    Rewrite,
    RewriteFailed,
    load_journal,
    snapshot,
)
from millstream.errors import JournalCorrupt, JournalNotWritten, MillstreamError
from millstream.model import Clock
from millstream.wire import ErrorReply

logger = logging.getLogger("millstream.journal")

SYNC_INTERVAL_MS: Final = 1000
RETRY_INTERVAL_MS: Final = 1000
PLACE_INTERVAL_MS: Final = 1000
REWRITE_PAUSE_MS: Final = 60_000
"""After a rewrite that failed, the next one that nobody asked for waits this long."""


class Persistence:
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
        """What the turn that is under way has changed so far."""
        self._unwritten: JournalUnwritable | None = None
        self.interrupted = False
        """A turn was broken off, at whatever line: ``recover`` before anything else."""
        self._open = True
        self.rewrite_min_bytes = rewrite_min_bytes
        self.rewrite_growth_percent = 100
        self.load_seconds = 0.0
        self.on = True
        """False after ``CONFIG SET appendonly no``: nothing is recorded, and the journal grows old."""
        self._engine = engine
        self._clock = clock
        self._files = files
        self._rewrite: Rewrite | None = None
        self._keeping = threading.Lock()
        """Held while house is kept, so that nobody closes files under its hands."""
        self._rewrite_failed = False
        self._no_rewrite_before_ms = 0
        self._last_sync_ms = self._last_retry_ms = self._last_look_ms = clock.monotonic_ms()
        self._lock = DirectoryLock(directory)
        self._lock.take()
        try:
            self.journal = Journal(directory / JOURNAL_NAME, files, policy)
            files.remove(directory / REWRITE_NAME)
            self._load()
            engine.hooks.rewrite_journal = self._rewrite_on_request
            engine.hooks.reload_journal = self._reload
            engine.hooks.persistence = self._info
            engine.config.start_with("auto-aof-rewrite-min-size", str(rewrite_min_bytes))
            # What CONFIG GET tells is how a writer learns which durability it can ask for.
            for name, value in (("appendonly", "yes"), ("appendfsync", policy), ("dir", str(directory))):
                engine.config.start_with(name, value)
        except BaseException:
            self._lock.release()
            raise

    def _load(self) -> None:
        began = time.perf_counter()
        loaded = load_journal(self._engine, self.journal.path, self._files, now_ms=self._clock.now_ms())
        try:
            self.journal.open(end=loaded.end, chain=loaded.chain, database=loaded.database)
        except (OSError, JournalUnwritable) as error:
            raise MillstreamError(
                f"the journal {self.journal.path} cannot be written: {error}. Make room, or check the disk."
            ) from error
        self.load_seconds = time.perf_counter() - began

    def write_units(self) -> None:
        """The turn's changes are in the journal when it returns. JournalUnwritable: some are not."""
        units, self.units = self.units, []
        unwritten, self._unwritten = self._unwritten, None
        if units:
            self.journal.append(units)
        if unwritten is not None:
            raise unwritten

    def recover(self) -> None:
        """After an interrupt (Ctrl-C, a time limit) in mid-turn. Nobody knows what of the turn is in memory, and how
        much of it in the file; so, as after a crash, the journal decides, which is read by whole turns. Clients stay.
        Runs under the lock; where it is interrupted itself, it begins again."""
        journal = self.journal
        self._engine.break_off()
        self.units, self._unwritten = [], None
        if self.on and not journal.sync_failed:  # else memory is all that can be trusted
            logger.warning("a command was interrupted: the journal %s is loaded again", journal.path)
            self._load_in_place()
        self.interrupted = False

    def _load_in_place(self) -> None:
        engine = self._engine
        for database in engine.databases:
            database.values.clear()
            database.expires.clear()
        loaded = load_journal(engine, self.journal.path, self._files, now_ms=self._clock.now_ms())
        self.journal.go_on_from(end=loaded.end, chain=loaded.chain, database=loaded.database)
        engine.memory.recount()

    # --- housekeeping -----------------------------------------------------------------------------------------------

    def keep_house(self, lock: AbstractContextManager[Any]) -> None:
        """``lock`` keeps others from writing; it is held for moments only."""
        with self._keeping:
            if self._open:
                self._keep_house(lock)

    def _keep_house(self, lock: AbstractContextManager[Any]) -> None:
        now_ms = self._clock.monotonic_ms()
        if self.on and now_ms - self._last_look_ms >= PLACE_INTERVAL_MS:
            self._last_look_ms = now_ms
            with lock:
                self.journal.check_place()
        if self.journal.trouble is not None and now_ms - self._last_retry_ms >= RETRY_INTERVAL_MS:
            self._last_retry_ms = now_ms
            with lock:
                self._mend()
        if self.journal.policy == "everysec" and now_ms - self._last_sync_ms >= SYNC_INTERVAL_MS:
            self._last_sync_ms = now_ms
            self._sync()
        self._keep_short(now_ms, lock)

    def _sync(self) -> None:
        try:
            if self.journal.unsynced:
                self.journal.sync()
        except JournalUnwritable:
            pass  # logged, and kept as the journal's trouble: writes are refused from now on

    def _mend(self) -> None:
        """Another try after a failure. After a failed fsync only a new file, made from memory, can be trusted."""
        try:
            if self.journal.sync_failed:
                self._abandon_rewrite()
                self._write_anew()
            else:
                self.journal.flush()
            logger.warning("the journal %s can be written again", self.journal.path)
        except (JournalUnwritable, OSError):
            pass  # still in trouble: writes stay refused, and the next try comes in a moment

    def _write_anew(self) -> None:
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

    def _grown(self) -> bool:
        size, base = self.journal.size, max(self.journal.base_size, 1)
        return (
            self.rewrite_growth_percent > 0
            and size >= self.rewrite_min_bytes
            and (size - base) * 100 >= base * self.rewrite_growth_percent
        )

    def _keep_short(self, now_ms: int, lock: AbstractContextManager[Any]) -> None:
        if self.journal.trouble is not None:
            return
        try:
            if self._rewrite is not None:
                self._advance(self._rewrite, lock)
            elif self._grown() and now_ms >= self._no_rewrite_before_ms:
                with lock:
                    if self._rewrite is None:  # BGREWRITEAOF may have been quicker
                        self._rewrite = Rewrite(self.journal, self._files)
        except (RewriteFailed, JournalUnwritable, OSError) as error:
            logger.warning("the journal %s could not be rewritten: %s", self.journal.path, error)
            self._rewrite_failed = True
            self._no_rewrite_before_ms = now_ms + REWRITE_PAUSE_MS
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

    # --- what the engine asks ---------------------------------------------------------------------------------------

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
        """DEBUG LOADAOF. Runs under the lock. A journal that cannot be read leaves the engine as it is."""
        self._write_units()
        try:
            load_journal(Engine(), self.journal.path, self._files, now_ms=self._clock.now_ms())
        except (JournalCorrupt, OSError) as error:
            logger.error("the journal was not loaded again: %s", error)
            raise ErrorReply("ERR Error trying to load the AOF files, check server logs.") from error
        self._load_in_place()

    def _write_units(self) -> None:
        """In the middle of a turn. A failure also voids the answers that the turn has given so far."""
        self.units += self._engine.take_units()
        try:
            self.write_units()
        except JournalUnwritable as error:
            self._unwritten = error
            raise ErrorReply(error.text) from error

    def _turn_off(self) -> None:
        """What was answered so far is on the disk; from now on a restart finds the state of this moment."""
        self._write_units()
        try:
            self.journal.sync()
        except JournalUnwritable as error:
            raise ErrorReply(error.text) from error
        self._abandon_rewrite()
        self.on = self._engine.recording = False
        logger.warning("the journal %s is off: from now on nothing outlives a restart", self.journal.path)

    def _turn_on(self) -> None:
        """A new journal, made from memory, takes the place of the old one before anything more is confirmed."""
        try:
            self._write_anew()
        except (JournalUnwritable, OSError) as error:
            logger.error("the journal %s could not be turned on: %s", self.journal.path, error)
            raise ErrorReply(
                "ERR CONFIG SET failed (possibly related to argument 'appendonly') - Unable to turn on AOF. "
                "Check server logs."
            ) from error
        self.on = self._engine.recording = True

    def configure(self, name: str, value: str) -> None:
        """CONFIG SET of what is ours. Runs under the lock."""
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
        """First housekeeping ends its work, for which it may need ``lock``; then nobody may be writing any more, not
        even who came before the end and still waits for the lock. JournalNotWritten: it is closed all the same."""
        with self._keeping:
            self._open = False
        with lock:
            try:
                self._abandon_rewrite()
                if self.interrupted:
                    self.recover()
                if self.on:
                    self.journal.check_place()  # housekeeping may have looked a second ago
                    if self.journal.sync_failed:
                        self._mend()
                self.journal.close()
            except (JournalUnwritable, JournalCorrupt, OSError) as error:
                raise JournalNotWritten(
                    f"the journal {self.journal.path} was closed, and not everything is in it: {error}",
                    path=str(self.journal.path),
                ) from error
            finally:
                self._lock.release()

    def disown(self) -> None:
        """In a forked child: lets go of the files without touching what the parent still uses."""
        self._open = False
        self._keeping = threading.Lock()  # the thread of housekeeping may have held it, and is not here
        self._rewrite = None
        self.journal.abandon()
        self._lock.release()
