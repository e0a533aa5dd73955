"""The embedded broker: an engine with a lock, a clock, delivery of asynchronous replies, and an optional journal.

Sessions execute commands from any thread. A reply is returned only after its change is in the journal. ``session.tag``
is the session's ``deliver(reply)``. It is called under the lock, so it must be fast and must not call the broker.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from millstream.broker.failures import typed_error
from millstream.broker.persistence import Persistence
from millstream.broker.scripts.emulations import register_emulations
from millstream.engine import Engine, Session
from millstream.engine.admission import reject
from millstream.engine.journal.files import DiskFiles, Files
from millstream.engine.journal.journal import POLICIES, JournalUnwritable, Policy
from millstream.engine.registry import Flag
from millstream.engine.session import BLOCKED
from millstream.errors import BrokerClosed, DurabilityUnavailable, InvalidArgument, ServerError
from millstream.model import Backoff, Clock, SystemClock
from millstream.wire import Args, ErrorReply, Push, Reply

logger = logging.getLogger("millstream.embedded")

Deliver = Callable[[Reply], Any]

_MULTI: Final = (b"MULTI",)
_EXEC: Final = (b"EXEC",)
_WRITES: Final = int(Flag.WRITE)
_HOUSEKEEPING_PAUSE: Final = Backoff(initial_ms=100, max_ms=1000)
_INTERRUPTED: Final = ErrorReply("UNBLOCKED the command that served this one was interrupted. Send it again.")


class Embedded:
    """An engine that all threads of this process share. Every method may be called from any thread.

    With ``directory`` it is durable: it loads the journal of that directory and locks the directory until ``close``.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        appendfsync: Policy = "everysec",
        clock: Clock | None = None,
        password: bytes | None = None,
        debug_enabled: bool = False,
        housekeeping: bool = True,
        rewrite_min_bytes: int = 64 << 20,
        files: Files | None = None,
    ) -> None:
        if appendfsync not in POLICIES:  # also without a directory, where it would have no effect
            raise InvalidArgument("appendfsync", appendfsync, "always, everysec or no")
        self.clock = clock or SystemClock()
        self._now_ms = self.clock.now_ms
        self._lock: threading.Lock | _ClosedLock = threading.Lock()
        self.engine = Engine(password=password, debug_enabled=debug_enabled, recording=directory is not None)
        self.engine.elapsed_ms = self.clock.monotonic_ms
        register_emulations(self.engine)
        self.on_configure: list[Callable[[str, str], Any]] = []
        """Called for every CONFIG SET, under the lock, with the checked name and value."""
        self.engine.hooks.configure = self._configure
        self.engine.hooks.sleep = time.sleep
        self.persistence: Persistence | None = None
        self._closing = threading.Lock()
        self._unconfirmed: list[tuple[Session, Reply]] = []
        """Replies for waiting clients whose change is not in the journal yet."""
        if directory is not None:
            self.persistence = Persistence(
                self.engine,
                directory,
                policy=appendfsync,
                clock=self.clock,
                files=files or DiskFiles(),
                rewrite_min_bytes=rewrite_min_bytes,
            )
            self.on_configure.append(self.persistence.configure)
        _ALIVE.add(self)
        if housekeeping:
            try:
                _start_housekeeping(self)
            except BaseException:  # interrupted, or no thread available: the caller gets no broker that it could close
                self.close()
                raise

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session(self, deliver: Deliver | None = None, *, address: bytes = b"", trusted: bool = True) -> Session:
        """Adds a client. ``deliver`` receives asynchronous replies: of commands that waited, and published messages."""
        with self._lock:
            self.engine.now_ms = self._now_ms()
            session = self.engine.session(address=address, trusted=trusted)
            session.tag = deliver
            return session

    def drop(self, session: Session) -> None:
        """Removes a client. Idempotent."""
        with self._lock:
            session.tag = None
            self.engine.drop(session)

    def cancel(self, session: Session) -> bool:
        """Cancels a waiting command. Returns False if it was not waiting any more.

        Then its reply has been delivered already, or is delivered as soon as the journal is writable.
        """
        with self._lock:
            return self.engine.cancel(session)

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes]) -> Reply:
        """Executes one command. Errors are returned, not raised; BLOCKED means that the reply is delivered later."""
        with self._lock:
            if self.persistence is not None:
                return self._execute_all(session, (args,))[0]
            engine = self.engine
            reply = engine.execute(session, args, self._now_ms())
            if engine.outbox:
                self._deliver(engine.take_outbox())
            return reply

    def immediate_executor(self, session: Session) -> Callable[[Args], Any]:
        """A function like ``execute`` for one session, for commands that do not wait; it raises errors as typed errors.

        Most calls use it, so it has as few steps as possible.
        """
        engine, now_ms = self.engine, self._now_ms

        def now(args: Args) -> Any:
            with self._lock:
                if self.persistence is None:
                    reply = engine.execute(session, args, now_ms())
                    if engine.outbox:
                        self._deliver(engine.take_outbox())
                else:
                    reply = self._execute_all(session, (args,))[0]
            if type(reply) is ErrorReply:
                raise typed_error(reply)
            return reply

        return now

    def execute_many(self, session: Session, commands: Sequence[Args], *, atomic: bool = False) -> list[Reply]:
        """Executes several commands under one lock, with one journal write. None of them may block.

        With ``atomic`` they are one MULTI/EXEC: if it is rejected, every reply is the error that rejected it.
        """
        with self._lock:
            if not atomic:
                return self._execute_all(session, commands)
            try:
                *queued, reply = self._execute_all(session, (_MULTI, *commands, _EXEC))[1:]
            except BaseException:
                # Interrupted: later commands of this session must not be queued in the open transaction.
                self.engine.execute(session, (b"DISCARD",), self._now_ms())
                raise
            if isinstance(reply, list):
                return reply
            # Rejected as a whole. A command that could not be queued has its own error; the others get EXEC's error.
            return [status if isinstance(status, ErrorReply) else reply for status in queued]

    def _execute_all(self, session: Session, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        engine, now_ms = self.engine, self._now_ms
        if self.persistence is None:
            execute = engine.execute
            replies = [execute(session, args, now_ms()) for args in commands]
            if engine.outbox:
                self._deliver(engine.take_outbox())
            return replies
        turn = Turn(self)
        replies = []
        changed = []
        try:
            for args in commands:
                replies.append(turn.execute(session, args))
                if turn.changed:
                    changed.append(len(replies) - 1)
            failure = turn.end()
        except BaseException:  # interrupted, or a bug: the turn must not stay open
            turn.abort()
            raise
        if failure is not None:
            for index in changed:
                if replies[index] is BLOCKED:
                    engine.cancel(session)
                replies[index] = failure
        return replies

    def turn(self) -> Turn:
        """For a server: ``with embedded.turn() as turn`` holds the lock over the commands of many sessions."""
        return Turn(self)

    def set_maxmemory(self, limit: int) -> None:
        """While more than ``limit`` bytes are used, commands that need memory are rejected; 0 is no limit."""
        with self._lock:
            self.engine.config.set_initial("maxmemory", str(limit))

    def _configure(self, name: str, value: str) -> None:
        if name == "appendonly" and value == "yes" and self.persistence is None:
            raise ErrorReply(
                "ERR CONFIG SET failed (possibly related to argument 'appendonly') - this server has no directory for "
                "a journal: start it with --dir"
            )
        for callback in list(self.on_configure):
            callback(name, value)

    # --- durability and time ----------------------------------------------------------------------------------------

    def fsync(self) -> None:
        """Syncs the journal: on return, every change that was confirmed before the call is on disk."""
        if self.persistence is None:
            raise DurabilityUnavailable(
                "fsynced", "this broker keeps its data only in memory. Open local:///path instead."
            )
        if not self.persistence.on:
            raise DurabilityUnavailable("fsynced", "the journal is off. Turn it on: CONFIG SET appendonly yes.")
        try:
            self.persistence.journal.sync()
        except JournalUnwritable as error:
            raise ServerError(error.text) from error

    def due_in_ms(self) -> int | None:
        """The time until ``tick`` must be called; None: not before another command changes it."""
        with self._lock:
            return self.engine.due_in_ms(self._now_ms())

    def tick(self) -> None:
        """Ends waits that have timed out and removes expired keys."""
        with self._lock:
            turn = Turn(self)
            try:
                turn.tick()
                turn.end()
            except BaseException:  # interrupted, or a bug: the turn must not stay open
                turn.abort()
                raise

    def run_housekeeping(self) -> None:
        """Expiry, fsync, retries after a failed write, rewriting of the journal.

        A daemon thread calls it about ten times per second, unless ``housekeeping`` is False.
        """
        self.tick()
        if self.persistence is not None:
            self.persistence.run_housekeeping(self._lock)
            with self._lock:
                if self._unconfirmed and self.persistence.journal.trouble is None:
                    replies, self._unconfirmed = self._unconfirmed, []
                    self._deliver(replies)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes and syncs the journal and releases the directory. Idempotent. Waiting commands get no reply.

        Raises JournalNotWritten if some changes could not be written; the broker is closed all the same.
        """
        with self._closing:
            lock = self._lock
            if isinstance(lock, _ClosedLock):
                return
            with lock:
                self._lock = _ClosedLock("this broker was closed. Open another one.")
            if self.persistence is not None:
                self.persistence.close(lock)

    @property
    def closed(self) -> bool:
        return isinstance(self._lock, _ClosedLock)

    def _deliver(self, outbox: list[tuple[Session, Reply]]) -> None:
        """Removes each reply after its delivery, so that an interrupt does not lose the remaining ones."""
        outbox.reverse()
        while outbox:
            session, reply = outbox[-1]
            if session.tag is not None:
                session.tag(reply)
            outbox.pop()

    def _disown(self) -> None:
        self._lock = _ClosedLock("this broker belongs to the process that was forked. Open one in each process.")
        if self.persistence is not None:
            self.persistence.disown()


class Turn:
    """A batch of commands with one journal write: replies may be sent only after ``end`` has written the changes.

    Without a journal, replies of waiting commands are delivered immediately. With one, they are delivered by ``end``.
    Published messages (pushes) are always delivered immediately, to keep their order among the replies.
    """

    __slots__ = ("_answers", "_embedded", "_engine", "_lock", "_now_ms", "_persistence", "changed")

    def __init__(self, embedded: Embedded) -> None:
        self._embedded = embedded
        self._lock = embedded._lock
        self._engine = embedded.engine
        self._persistence = embedded.persistence
        self._now_ms = embedded._now_ms
        self._answers: list[tuple[Session, Reply]] = []
        self.changed = False
        """Whether the last command changed something. If ``end`` fails, its reply must be replaced by the error."""

    def execute(self, session: Session, args: Sequence[bytes]) -> Reply:
        """Executes one command of a session; the reply may be sent after ``end``."""
        engine = self._engine
        persistence = self._persistence
        if persistence is None:
            reply = engine.execute(session, args, self._now_ms())
            if engine.outbox:
                self._embedded._deliver(engine.take_outbox())
            return reply
        if persistence.interrupted:
            persistence.recover()
        trouble = persistence.journal.trouble
        if trouble is not None and (rejection := _rejection(session, args, trouble)) is not None:
            self.changed = False
            return rejection
        reply = engine.execute(session, args, self._now_ms())
        self._collect(persistence)
        return reply

    def tick(self) -> None:
        """As ``Embedded.tick``, within this turn."""
        if self._persistence is not None and self._persistence.interrupted:
            self._persistence.recover()
        self._engine.tick(self._now_ms())
        if self._persistence is not None:
            self._collect(self._persistence)
        elif self._engine.outbox:
            self._embedded._deliver(self._engine.take_outbox())

    def _collect(self, persistence: Persistence) -> None:
        units = self._engine.take_units()
        self.changed = bool(units)
        persistence.units += units
        if outbox := self._engine.outbox:
            for session, reply in outbox:
                if type(reply) is Push and session.tag is not None:
                    session.tag(reply)
                else:
                    self._answers.append((session, reply))
            outbox.clear()  # last, so that an interrupt does not lose replies

    def end(self) -> ErrorReply | None:
        """Writes the changes, then delivers the replies. Returns an error if the changes could not be written."""
        persistence = self._persistence
        if persistence is None:
            return None
        self._collect(persistence)
        try:
            persistence.write_units()
        except JournalUnwritable as error:
            self._embedded._unconfirmed += self._answers
            self._answers = []
            return ErrorReply(error.unwritten)
        if self._answers:
            self._embedded._deliver(self._answers)
        return None

    def abort(self) -> None:
        """Marks the turn as interrupted: the next turn recovers first, and waiting clients get an error to retry."""
        persistence = self._persistence
        if persistence is None:
            return
        persistence.interrupted = True
        unserved = self._engine.discard_interrupted().union(session for session, _ in self._answers)
        self._embedded._deliver([(session, _INTERRUPTED) for session in unserved])

    def __enter__(self) -> Turn:
        self._lock.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.__exit__(kind, error, tb)


def _rejection(session: Session, args: Sequence[bytes], trouble: str) -> Reply | None:
    """The error for a command that would write while the journal is not writable; None if it only reads."""
    try:
        spec = session.engine.table.look_up(args)
    except ErrorReply:
        return None
    writes = spec.bits & _WRITES or spec.name in ("EVAL", "EVALSHA")
    if spec.name == "EXEC" and session.queue is not None:
        writes = any(queued.bits & _WRITES or queued.name in ("EVAL", "EVALSHA") for queued, _ in session.queue)
    return reject(session, spec, trouble) if writes else None


class _ClosedLock:
    """Replaces the lock of a closed broker, so that commands need no check of their own whether it is closed."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __enter__(self) -> None:
        raise BrokerClosed(self._reason)

    def __exit__(self, *_: object) -> None:
        raise BrokerClosed(self._reason)


# --- housekeeping, and forks -----------------------------------------------------------------------------------------


def _start_housekeeping(embedded: Embedded) -> None:
    """Starts a thread that runs housekeeping until the broker is closed or collected."""
    reference = weakref.ref(embedded)
    pause = threading.Event()

    def run() -> None:
        failures = 0
        while not pause.wait(_HOUSEKEEPING_PAUSE.delay_ms(failures + 1, random.random()) / 1000):  # noqa: S311 (no secret)
            broker = reference()
            if broker is None or broker.closed:
                return
            try:
                broker.run_housekeeping()
                failures = 0
            except BrokerClosed:
                return
            except Exception:
                # The thread must continue: without housekeeping the journal would never be synced.
                failures += 1
                logger.exception("housekeeping of the embedded broker failed; it is retried")
            del broker

    threading.Thread(target=run, name="millstream-housekeeping", daemon=True).start()


_ALIVE: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _disown_all() -> None:
    """In a forked child: releases all brokers. The parent keeps using them, and two writers would corrupt the
    journal.
    """
    for embedded in list(_ALIVE):
        embedded._disown()


os.register_at_fork(after_in_child=_disown_all)
