"""One client's side of the engine: what a connection remembers between two commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.wire import to_name

if TYPE_CHECKING:
    from millstream.engine.blocking import Block
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database
    from millstream.engine.registry import Spec


class Session:
    """Made by ``Engine.session()``, ended by ``Engine.drop(session)``."""

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
        "monitoring",
        "muted",
        "name",
        "patterns",
        "protocol",
        "queue",
        "queue_bytes",
        "queue_failed",
        "seen_ms",
        "skips",
        "special",
        "starved",
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
        """When its last command ran."""
        self.last: Spec | None = None
        """Its last command."""
        self.authenticated = True
        """False until AUTH where the engine has a password; then almost everything is refused."""
        self.special = False
        """True when the next command cannot take the short way; ``refresh`` says why."""
        self.queue: list[tuple[Spec, Sequence[bytes]]] | None = None
        """Commands between MULTI and EXEC."""
        self.queue_failed = False
        self.queue_bytes = 0
        self.watched: set[tuple[int, bytes]] = set()
        self.dirty = False
        """A watched key has changed: the next EXEC is aborted."""
        self.channels: dict[bytes, None] = {}
        """In order of subscription, as the other two."""
        self.patterns: dict[bytes, None] = {}
        self.monitoring = False
        self.muted = False
        """CLIENT REPLY OFF: it wants no answers."""
        self.skips = False
        """CLIENT REPLY SKIP: it wants no answer to its next command."""
        self.blocked: Block | None = None
        """What it waits for. The driver sends it no further command until this is None again: then the answer is in
        the outbox."""
        self.may_block = True
        """False inside EXEC and inside a script, where Redis does not block either."""
        self.starved: bool | None = None
        """Inside EXEC: whether memory was short when it began. Scripts in it go by that."""
        self.closing = False
        """The driver closes the connection after the replies that are on their way to it (QUIT, CLIENT KILL)."""
        self.tag: Any = None
        """The driver's own mark (a connection, a future). The engine never looks at it."""

    @property
    def subscriptions(self) -> int:
        return len(self.channels) + len(self.patterns)

    def refresh(self) -> None:
        """To be called after a change of anything that decides whether commands take the short way."""
        self.special = (
            self.queue is not None
            or not self.authenticated
            or bool(self.channels)
            or bool(self.patterns)
            or self.muted
            or self.skips
            or self.engine.guarded
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
    """The line of CLIENT LIST. What only a server knows (file descriptors, buffers) is not in it."""
    now_ms = session.engine.now_ms
    facts: dict[str, object] = {
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
        "cmd": "NULL" if session.last is None else session.last.spoken,
        "user": "default",
        "redir": -1,
        "resp": session.protocol,
        "lib-name": to_name(session.library.get(b"LIB-NAME", b"")),
        "lib-ver": to_name(session.library.get(b"LIB-VER", b"")),
    }
    return " ".join(f"{name}={value}" for name, value in facts.items())
