"""The state of one client between two commands, and the queues of blocked sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from millstream.wire import NIL_ARRAY, Reply, to_name

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database
    from millstream.engine.registry import Spec


class Session:
    """The state of one client. Created by ``Engine.session()``, ended by ``Engine.drop(session)``."""

    __slots__ = (
        "address",
        "authenticated",
        "blocked",
        "channels",
        "closing",
        "created_ms",
        "db",
        "dirty",
        "engine",
        "id",
        "last",
        "library",
        "may_block",
        "memory_exceeded",
        "monitoring",
        "muted",
        "name",
        "patterns",
        "protocol",
        "queue",
        "queue_bytes",
        "queue_failed",
        "seen_ms",
        "skip_reply",
        "special",
        "tag",
        "watched",
    )

    def __init__(self, engine: Engine, session_id: int, db: Database) -> None:
        self.engine = engine
        self.id = session_id
        self.db = db
        self.protocol = 2
        self.name = b""
        self.address = b""
        self.library: dict[bytes, bytes] = {}
        self.created_ms = engine.now_ms
        self.seen_ms = engine.now_ms
        """The time of its last command."""
        self.last: Spec | None = None
        """Its last command."""
        self.authenticated = True
        """False until AUTH if the engine has a password. Then most commands are rejected."""
        self.special = False
        """Whether the next command must pass the checks of ``admission``; ``refresh`` computes it."""
        self.queue: list[tuple[Spec, Sequence[bytes]]] | None = None
        """Commands between MULTI and EXEC."""
        self.queue_failed = False
        self.queue_bytes = 0
        self.watched: set[tuple[int, bytes]] = set()
        self.dirty = False
        """Whether a watched key has changed: the next EXEC is aborted."""
        self.channels: dict[bytes, None] = {}
        """In order of subscription, like ``patterns``."""
        self.patterns: dict[bytes, None] = {}
        self.monitoring = False
        self.muted = False
        """CLIENT REPLY OFF: the client receives no replies."""
        self.skip_reply = False
        """CLIENT REPLY SKIP: the client receives no reply to its next command."""
        self.blocked: Block | None = None
        """What the session waits for. The driver executes no further command of it until this is None again. Then the
        reply is in the outbox."""
        self.may_block = True
        """False inside EXEC and inside a script, where commands do not block."""
        self.memory_exceeded: bool | None = None
        """Inside EXEC: whether the memory limit was exceeded when EXEC started. Scripts in it use this value."""
        self.closing = False
        """The driver closes the connection after it has sent the outstanding replies (QUIT, CLIENT KILL)."""
        self.tag: Any = None
        """A value of the driver (a connection, a future). The engine does not use it."""

    @property
    def subscriptions(self) -> int:
        return len(self.channels) + len(self.patterns)

    def refresh(self) -> None:
        """Updates ``special``. To be called after a change of any of these values."""
        self.special = (
            self.queue is not None
            or not self.authenticated
            or bool(self.channels)
            or bool(self.patterns)
            or self.muted
            or self.skip_reply
            or self.engine.checks_every_command
        )


def _flags(session: Session) -> str:
    marks = {
        "O": session.monitoring,
        "P": session.subscriptions > 0,
        "x": session.queue is not None,
        "b": session.blocked is not None,
        "d": session.dirty,
        "c": session.closing,
    }
    return "".join(mark for mark, holds in marks.items() if holds) or "N"


def describe(session: Session) -> str:
    """The session's line in CLIENT LIST, without values that only a server has (file descriptors, buffers)."""
    now_ms = session.engine.now_ms
    values: dict[str, object] = {
        "id": session.id,
        "addr": to_name(session.address),
        "name": to_name(session.name),
        "age": max(now_ms - session.created_ms, 0) // 1000,
        "idle": max(now_ms - session.seen_ms, 0) // 1000,
        "flags": _flags(session),
        "db": session.db.index,
        "sub": len(session.channels),
        "psub": len(session.patterns),
        "ssub": 0,
        "multi": -1 if session.queue is None else len(session.queue),
        "cmd": "NULL" if session.last is None else session.last.display_name,
        "user": "default",
        "redir": -1,
        "resp": session.protocol,
        "lib-name": to_name(session.library.get(b"LIB-NAME", b"")),
        "lib-ver": to_name(session.library.get(b"LIB-VER", b"")),
    }
    return " ".join(f"{name}={value}" for name, value in values.items())


class Block:
    """Returned by a handler to block the session until one of ``keys`` changes.

    ``serve(key)`` tries again after a change of ``key``. A reply (or an ErrorReply, returned or raised) ends the wait;
    None continues it. ``wait_ms`` is the timeout; 0 or None means no timeout.
    """

    __slots__ = ("keys", "serve", "timeout_reply", "wait_ms")

    def __init__(
        self,
        keys: Sequence[bytes],
        wait_ms: int | None,
        serve: Callable[[bytes], Reply | None],
        timeout_reply: Reply = NIL_ARRAY,
    ) -> None:
        self.keys = keys
        self.wait_ms = wait_ms
        self.serve = serve
        self.timeout_reply = timeout_reply


class _Blocked:
    def __repr__(self) -> str:
        return "BLOCKED"


BLOCKED: Final = _Blocked()
"""Returned by ``execute`` for a command that blocks: its reply will be in the outbox later."""


class BlockedSessions:
    """Blocked sessions, by key and by deadline. A session waits in the database that was selected when it blocked.

    Deadlines use the engine's monotonic ``elapsed_ms``, because setting the wall clock back would lengthen every wait.
    """

    __slots__ = ("_databases", "_deadlines", "_sequence")

    def __init__(self) -> None:
        self._databases: dict[Session, Database] = {}
        self._deadlines: list[tuple[int, int, Session, Block]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._databases)

    def __contains__(self, session: Session) -> bool:
        return session in self._databases

    def add(self, session: Session, block: Block, elapsed_ms: int) -> None:
        db = session.db
        session.blocked = block
        self._databases[session] = db
        for key in dict.fromkeys(block.keys):
            db.blocked.setdefault(key, deque()).append(session)
        db.refresh()
        if block.wait_ms:
            self._sequence += 1
            heappush(self._deadlines, (elapsed_ms + block.wait_ms, self._sequence, session, block))

    def remove(self, session: Session) -> Block | None:
        """Unblocks the session. Returns what it waited for; None if it was not blocked."""
        db = self._databases.pop(session, None)
        block, session.blocked = session.blocked, None
        if db is None or block is None:
            return None
        for key in dict.fromkeys(block.keys):
            queue = db.blocked[key]
            queue.remove(session)
            if not queue:
                del db.blocked[key]
        db.refresh()
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._databases):
            self._deadlines = [item for item in self._deadlines if item[2].blocked is item[3]]
            heapify(self._deadlines)
        return block

    def next_deadline(self) -> int | None:
        while self._deadlines:
            deadline_ms, _, session, block = self._deadlines[0]
            if session.blocked is block:
                return deadline_ms
            heappop(self._deadlines)
        return None

    def overdue(self, elapsed_ms: int) -> list[Session]:
        """The sessions whose deadline has passed, the earliest first. The caller calls ``remove`` for each."""
        due = []
        while (deadline_ms := self.next_deadline()) is not None and deadline_ms <= elapsed_ms:
            due.append(heappop(self._deadlines)[2])
        return due
