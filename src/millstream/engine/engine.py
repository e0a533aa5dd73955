"""The state machine: sessions send commands, replies come back, and the outbox holds what others must be told.

Whoever drives it (the embedded link, the server) holds the lock, the clock and the journal:

    reply = engine.execute(session, args, now_ms)
    engine.take_units()   -> what must be in the journal before anything is answered
    engine.take_outbox()  -> replies to sessions that were blocked, and messages to subscribers

``execute`` never raises an ErrorReply: it returns it. BLOCKED means that the answer will come through the outbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from millstream.engine.blocking import Block
from millstream.engine.keyspace import Database
from millstream.engine.registry import COMMANDS, Flag, Spec
from millstream.engine.session import Session
from millstream.wire.replies import NIL_ARRAY, ErrorReply, Reply

DATABASES: Final = 16


class _Blocked:
    def __repr__(self) -> str:
        return "BLOCKED"


BLOCKED: Final = _Blocked()

Effect = tuple[int, tuple[bytes, ...]]
"""A database's number, and a command that brings about the change wherever it is replayed: explicit ids and times."""


class Engine:
    """Not thread-safe by itself: the driver serialises. ``now_ms`` is the time of the command being executed."""

    def __init__(self, *, password: bytes | None = None, recording: bool = False) -> None:
        self.now_ms = 0
        self.password = password
        self.databases = [Database(self, index) for index in range(DATABASES)]
        self.sessions: dict[int, Session] = {}
        self.table: dict[bytes, Spec] = {name.encode(): spec.copy() for name, spec in COMMANDS.items()}
        self.monitors: set[Session] = set()
        self.outbox: list[tuple[Session, Reply]] = []
        self._effects: list[Effect] | None = [] if recording else None
        self._units: list[list[Effect]] = []
        self._ready: list[tuple[Database, bytes]] = []
        self._waiting: set[Session] = set()
        self._next_session = 1

    # --- sessions ---------------------------------------------------------------------------------------------------

    def session(self, *, address: bytes = b"", trusted: bool = False) -> Session:
        """A new client. A trusted one (the process that embeds the engine) needs no password."""
        session = Session(self, self._next_session, self.databases[0])
        self._next_session += 1
        session.address = address
        if self.password is not None and not trusted:
            session.authenticated = False
            session.special = True
        self.sessions[session.id] = session
        return session

    def drop(self, session: Session) -> None:
        """The client is gone: it waits for nothing, watches nothing, hears nothing."""
        self.sessions.pop(session.id, None)
        self._forget_wait(session)
        self.unwatch(session)
        self.monitors.discard(session)
        session.channels.clear()
        session.patterns.clear()

    # --- commands ---------------------------------------------------------------------------------------------------

    def execute(self, session: Session, args: Sequence[bytes], now_ms: int) -> Reply:
        """Runs one command to its end, and then everything that it made possible for blocked sessions."""
        self.now_ms = now_ms
        spec = self.table.get(args[0]) or self.table.get(args[0].upper())
        if spec is None:
            return self._refuse(session, None, unknown_command(args))
        arity = spec.arity
        if len(args) != arity if arity >= 0 else len(args) < -arity:
            return self._refuse(session, spec, f"ERR wrong number of arguments for '{spec.name.lower()}' command")
        if (session.special or self.monitors) and (early := self._special(session, spec, args)) is not None:
            return early
        reply = self.run(session, spec, args)
        if self._ready:
            self._serve_ready()
        if type(reply) is Block:
            return self._wait(session, reply)
        return reply

    def run(self, session: Session, spec: Spec, args: Sequence[bytes]) -> Reply:
        """The command itself: also what EXEC calls for each queued command."""
        spec.calls += 1
        try:
            return spec.handler(session, args)
        except ErrorReply as error:
            spec.failed += 1
            return error
        finally:
            if self._effects and session.may_block:
                self._close_unit()
