"""The engine, driven: a lock, a clock, and the delivery of what others must be told; with a directory also a journal.

In: commands of sessions, from any thread. Out: replies, but never one whose change is not in the journal.
``session.tag`` is the session's ``deliver(reply)``: called under the lock, so it must be quick and must not call back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from millstream.engine.engine import Engine
from millstream.engine.session import Session
from millstream.model.clock import Clock, SystemClock
from millstream.wire.commands import Args
from millstream.wire.replies import ErrorReply, Reply

Deliver = Callable[[Reply], Any]

_MULTI: Final = (b"MULTI",)
_EXEC: Final = (b"EXEC",)


class Embedded:
    """One engine for all threads of this process. Every method may be called from any of them."""

    def __init__(
        self, *, clock: Clock | None = None, password: bytes | None = None, debug_enabled: bool = False
    ) -> None:
        self.clock = clock or SystemClock()
        self._now_ms = self.clock.now_ms
        self._lock = threading.Lock()
        self.engine = Engine(password=password, debug_enabled=debug_enabled)
        self._closed = False

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
        """A waiter gives up. False: it was not waiting any more, so its answer has already been delivered."""
        with self._lock:
            return self.engine.cancel(session)

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes]) -> Reply:
        """One command. BLOCKED means that the answer will be delivered; errors are returned, never raised."""
        with self._lock:
            engine = self.engine
            reply = engine.execute(session, args, self._now_ms())
            if engine.outbox:
                self._deliver()
            return reply

    def execute_many(self, session: Session, commands: Sequence[Args], *, atomic: bool = False) -> list[Reply]:
        """Commands in one go: one lock, one journal write. None of them may block.

        With ``atomic`` they are one MULTI/EXEC: if it is refused, every reply is the error that refused it.
        """
        with self._lock:
            engine = self.engine
            if atomic:
                replies = self._transaction(session, commands)
            else:
                execute, now_ms = engine.execute, self._now_ms
                replies = [execute(session, args, now_ms()) for args in commands]
            if engine.outbox:
                self._deliver()
            return replies

    def _transaction(self, session: Session, commands: Sequence[Args]) -> list[Reply]:
        execute, now_ms = self.engine.execute, self._now_ms()
        execute(session, _MULTI, now_ms)
        queued = [execute(session, args, now_ms) for args in commands]
        reply = execute(session, _EXEC, now_ms)
        if isinstance(reply, list):
            return reply
        # Refused as a whole. A command that could not even be queued tells why; the others share EXEC's answer.
        return [one if isinstance(one, ErrorReply) else reply for one in queued]

    # --- time -------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        """When ``tick`` has something to do, on the wall clock; None: never, unless commands come."""
        with self._lock:
            return self.engine.next_deadline()

    def tick(self) -> None:
        """Ends the waits whose time is over, and removes keys whose time is over."""
        with self._lock:
            self.engine.tick(self._now_ms())
            if self.engine.outbox:
                self._deliver()

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent. Whoever still waits is told nothing more."""
        with self._lock:
            self._closed = True

    def _deliver(self) -> None:
        for session, reply in self.engine.take_outbox():
            if session.tag is not None:
                session.tag(reply)
