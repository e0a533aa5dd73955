"""One client's side of the engine: what a connection remembers between two commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.engine.blocking import Block
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database


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
        "library",
        "may_block",
        "monitoring",
        "name",
        "patterns",
        "protocol",
        "queue",
        "queue_failed",
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
        self.authenticated = True
        """False until AUTH where the engine has a password; then almost everything is refused."""
        self.special = False
        """True when the next command cannot take the short way: in MULTI, subscribed, or not authenticated."""
        self.queue: list[Sequence[bytes]] | None = None
        """Commands between MULTI and EXEC."""
        self.queue_failed = False
        self.watched: set[tuple[int, bytes]] = set()
        self.dirty = False
        """A watched key has changed: the next EXEC is aborted."""
        self.channels: set[bytes] = set()
        self.patterns: set[bytes] = set()
        self.monitoring = False
        self.blocked: Block | None = None
        """What it waits for. The driver sends it no further command until the answer has left through the outbox."""
        self.may_block = True
        """False inside EXEC and inside a script, where Redis does not block either."""
        self.closing = False
        """QUIT was answered: the driver closes the connection after the replies have left."""
        self.tag: Any = None
        """The driver's own mark (a connection, a future). The engine never looks at it."""
