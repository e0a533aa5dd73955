"""The engine, driven: a lock, a clock, and the delivery of what others must be told; with a directory also a journal.

In: commands of sessions, from any thread. Out: replies, but never one whose change is not in the journal.
``session.tag`` is the session's ``deliver(reply)``: called under the lock, so it must be quick and must not call back.
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

from millstream.broker.failures import typed
from millstream.broker.persistence import Persistence
from millstream.broker.steps.twins import register_twins
from millstream.engine import (
    BLOCKED,
    POLICIES,
    DiskFiles,
    Engine,
    Files,
    Flag,
    JournalUnwritable,
    Policy,
    Session,
    reject,
)
from millstream.errors import BrokerClosed, DurabilityUnavailable, InvalidArgument, ServerError
from millstream.model import Backoff, Clock, SystemClock
from millstream.wire import Args, ErrorReply, Push, Reply

logger = logging.getLogger("millstream.embedded")

Deliver = Callable[[Reply], Any]

_MULTI: Final = (b"MULTI",)
_EXEC: Final = (b"EXEC",)
_WRITES: Final = int(Flag.WRITE)
_REST: Final = Backoff(initial_ms=100, max_ms=1000)
_INTERRUPTED: Final = ErrorReply("UNBLOCKED the command that served this one was interrupted. Ask again.")


class Embedded:
    """One engine for all threads of this process. Every method may be called from any of them.

    With ``directory`` it is durable: what is there is loaded, and the directory is this process's until ``close``.
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
        if appendfsync not in POLICIES:  # without a directory too: who asks for it believes that it counts
            raise InvalidArgument("appendfsync", appendfsync, "always, everysec or no")
        self.clock = clock or SystemClock()
        self._now_ms = self.clock.now_ms
        self._lock: threading.Lock | _Barred = threading.Lock()
        self.engine = Engine(password=password, debug_enabled=debug_enabled, recording=directory is not None)
        self.engine.elapsed_ms = self.clock.monotonic_ms
        register_twins(self.engine)
        self.on_configure: list[Callable[[str, str], Any]] = []
        """Told of every CONFIG SET, under the lock: name and value, both checked."""
        self.engine.hooks.configure = self._configure
        self.engine.hooks.sleep = time.sleep
        self.persistence: Persistence | None = None
        self._closing = threading.Lock()
        self._held: list[tuple[Session, Reply]] = []
        """Answers to waiters whose change is not in the journal yet."""
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
            except BaseException:  # interrupted, or no thread to be had: nobody gets this broker, so nobody closes it
                self.close()
                raise

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session(self, deliver: Deliver | None = None, *, address: bytes = b"", trusted: bool = True) -> Session:
        """A new client. ``deliver`` gets what comes unasked: the answer to a command that waited, and messages."""
        with self._lock:
            self.engine.now_ms = self._now_ms()
            session = self.engine.session(address=address, trusted=trusted)
            session.tag = deliver
            return session

    def drop(self, session: Session) -> None:
        """The client is gone. Idempotent."""
        with self._lock:
            session.tag = None
            self.engine.drop(session)

    def cancel(self, session: Session) -> bool:
        """A waiter gives up. False: it was not waiting any more, so its answer has already been delivered (or will be,
        as soon as the journal can be written again)."""
        with self._lock:
            return self.engine.cancel(session)

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes]) -> Reply:
        """One command. BLOCKED means that the answer will be delivered; errors are returned, never raised."""
        with self._lock:
            if self.persistence is not None:
                return self._execute_all(session, (args,))[0]
            engine = self.engine
            reply = engine.execute(session, args, self._now_ms())
            if engine.outbox:
                self._deliver(engine.take_outbox())
            return reply

    def answering(self, session: Session) -> Callable[[Args], Any]:
        """``execute`` for one client and for commands that do not wait; an error is raised, as its typed one.

        The shortest way there is, for most calls take it.
        """
        engine, now_ms = self.engine, self._now_ms

        def now(words: Args) -> Any:
            with self._lock:
                if self.persistence is None:
                    reply = engine.execute(session, words, now_ms())
                    if engine.outbox:
                        self._deliver(engine.take_outbox())
                else:
                    reply = self._execute_all(session, (words,))[0]
            if type(reply) is ErrorReply:
                raise typed(reply)
            return reply

        return now

    def execute_many(self, session: Session, commands: Sequence[Args], *, atomic: bool = False) -> list[Reply]:
        """Commands in one go: one lock, one journal write. None of them may block.

        With ``atomic`` they are one MULTI/EXEC: if it is refused, every reply is the error that refused it.
        """
        with self._lock:
            if not atomic:
                return self._execute_all(session, commands)
            try:
                *queued, reply = self._execute_all(session, (_MULTI, *commands, _EXEC))[1:]
            except BaseException:
                # Interrupted: what this client asks for next must not be queued behind it.
                self.engine.execute(session, (b"DISCARD",), self._now_ms())
                raise
            if isinstance(reply, list):
                return reply
            # Refused as a whole. A command that could not even be queued tells why; the others share EXEC's answer.
            return [one if isinstance(one, ErrorReply) else reply for one in queued]

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
        except BaseException:
            turn.break_off()
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
        """Commands that need memory are refused while more than ``limit`` bytes are used; 0 is no limit."""
        with self._lock:
            self.engine.config.start_with("maxmemory", str(limit))

    def _configure(self, name: str, value: str) -> None:
        if name == "appendonly" and value == "yes" and self.persistence is None:
            raise ErrorReply(
                "ERR CONFIG SET failed (possibly related to argument 'appendonly') - this server has no directory for "
                "a journal: start it with --dir"
            )
        for told in list(self.on_configure):
            told(name, value)

    # --- durability and time ----------------------------------------------------------------------------------------

    def fsync(self) -> None:
        """Everything that was answered before the call is on the disk when it returns."""
        if self.persistence is None:
            raise DurabilityUnavailable("fsynced", "this broker lives in memory. Open local:///path instead.")
        if not self.persistence.on:
            raise DurabilityUnavailable("fsynced", "the journal is off. Turn it on: CONFIG SET appendonly yes.")
        try:
            self.persistence.journal.sync()
        except JournalUnwritable as error:
            raise ServerError(error.text) from error

    def due_in_ms(self) -> int | None:
        """In how long ``tick`` has something to do; None: never, unless commands come."""
        with self._lock:
            return self.engine.due_in_ms(self._now_ms())

    def tick(self) -> None:
        """Ends the waits whose time is over, and removes keys whose time is over."""
        with self._lock:
            turn = Turn(self)
            try:
                turn.tick()
                turn.end()
            except BaseException:
                turn.break_off()
                raise

    def keep_house(self) -> None:
        """What must be done now and then: expiry, fsync, another try after a failed write, rewriting. Called ten times
        a second by a thread of our own, unless ``housekeeping`` is off."""
        self.tick()
        if self.persistence is not None:
            self.persistence.keep_house(self._lock)
            with self._lock:
                if self._held and self.persistence.journal.trouble is None:
                    held, self._held = self._held, []
                    self._deliver(held)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Writes and syncs what is outstanding, and lets go of the directory. Idempotent. Waiters stay unanswered.

        JournalNotWritten: it is closed, and the disk has not taken everything."""
        with self._closing:
            lock = self._lock
            if isinstance(lock, _Barred):
                return
            with lock:
                self._lock = _Barred("this broker was closed. Open another one.")
            if self.persistence is not None:
                self.persistence.close(lock)

    @property
    def closed(self) -> bool:
        return isinstance(self._lock, _Barred)

    def _deliver(self, outbox: list[tuple[Session, Reply]]) -> None:
        """An answer leaves the list once it is given: interrupted, the rest is still to be found."""
        outbox.reverse()
        while outbox:
            session, reply = outbox[-1]
            if session.tag is not None:
                session.tag(reply)
            outbox.pop()

    def _disown(self) -> None:
        self._lock = _Barred("this broker belongs to the process that was forked. Open one in each process.")
        if self.persistence is not None:
            self.persistence.disown()


class Turn:
    """Commands whose changes are written together, and whose answers may leave only when ``end`` has written them.

    Where there is no journal, answers to waiters are delivered as they come. With one, they are delivered at the end;
    messages (pushes) are no answers, and are delivered as they come, so that they keep their place among the replies.
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
        """Whether the last command changed something: its reply becomes void if ``end`` fails."""

    def execute(self, session: Session, args: Sequence[bytes]) -> Reply:
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
        if trouble is not None and (refused := _refuse(session, args, trouble)) is not None:
            self.changed = False
            return refused
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
            outbox.clear()  # afterwards: interrupted in between, each answer is still to be found

    def end(self) -> ErrorReply | None:
        """Writes, then delivers. An error: it could not be written, and the changes are not to be confirmed."""
        persistence = self._persistence
        if persistence is None:
            return None
        self._collect(persistence)
        try:
            persistence.write_units()
        except JournalUnwritable as error:
            self._embedded._held += self._answers
            self._answers = []
            return ErrorReply(error.unwritten)
        if self._answers:
            self._embedded._deliver(self._answers)
        return None

    def break_off(self) -> None:
        """An interrupt has struck somewhere in this turn: the next one recovers first, and nobody waits in vain."""
        persistence = self._persistence
        if persistence is None:
            return
        persistence.interrupted = True
        unheard = self._engine.break_off().union(session for session, _ in self._answers)
        self._embedded._deliver([(session, _INTERRUPTED) for session in unheard])

    def __enter__(self) -> Turn:
        self._lock.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.__exit__(kind, error, tb)


def _refuse(session: Session, args: Sequence[bytes], trouble: str) -> Reply | None:
    """The answer to a command that would write while nothing can be written; None where it only reads."""
    try:
        spec = session.engine.table.look_up(args)
    except ErrorReply:
        return None
    writes = spec.bits & _WRITES or spec.name in ("EVAL", "EVALSHA")
    if spec.name == "EXEC" and session.queue is not None:
        writes = any(one.bits & _WRITES or one.name in ("EVAL", "EVALSHA") for one, _ in session.queue)
    return reject(session, spec, trouble) if writes else None


class _Barred:
    """Stands in for the lock where nothing may enter any more, so that the way in costs nobody a test."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __enter__(self) -> None:
        raise BrokerClosed(self._why)

    def __exit__(self, *_: object) -> None:
        raise BrokerClosed(self._why)


# --- housekeeping, and forks -----------------------------------------------------------------------------------------


def _start_housekeeping(embedded: Embedded) -> None:
    """A thread that keeps house until the broker is closed, or nobody has it any more."""
    own = weakref.ref(embedded)
    pause = threading.Event()

    def keep() -> None:
        failures = 0
        while not pause.wait(_REST.delay_ms(failures + 1, random.random()) / 1000):  # noqa: S311 (no secret)
            one = own()
            if one is None or one.closed:
                return
            try:
                one.keep_house()
                failures = 0
            except BrokerClosed:
                return
            except Exception:
                # Without housekeeping nothing would be synced any more, and nobody would know.
                failures += 1
                logger.exception("housekeeping failed, and will be tried again")
            del one

    threading.Thread(target=keep, name="millstream-housekeeping", daemon=True).start()


_ALIVE: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _disown_all() -> None:
    """In a forked child: the parent goes on with these, and two writers would tear the journal to pieces."""
    for embedded in list(_ALIVE):
        embedded._disown()


os.register_at_fork(after_in_child=_disown_all)
