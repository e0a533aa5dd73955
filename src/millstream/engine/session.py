"""One client's side of the engine: what a connection remembers between two commands, and how it waits."""

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


class Block:
    """What a handler returns when it has nothing yet and the client allowed it to wait.

    ``serve(key)`` tries again for one key that was touched: a reply (an ErrorReply, raised or returned, too) ends the
    wait, None goes on waiting. ``wait_ms`` is how long; 0 or None is for ever.
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
"""What ``execute`` returns for a command that waits: its answer will come through the outbox."""


class WaitingRoom:
    """Sessions that wait, by key and by deadline. A session sits in the queue of the database that it waits in, which
    stays the one that it had selected when it began to wait.

    Deadlines are on the engine's ``elapsed_ms``, never on the wall clock: set back, that would lengthen every wait."""

    __slots__ = ("_deadlines", "_places", "_ticket")

    def __init__(self) -> None:
        self._places: dict[Session, Database] = {}
        self._deadlines: list[tuple[int, int, Session, Block]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: Session) -> bool:
        return session in self._places

    def enter(self, session: Session, block: Block, elapsed_ms: int) -> None:
        db = session.db
        session.blocked = block
        self._places[session] = db
        for key in dict.fromkeys(block.keys):
            db.blocked.setdefault(key, deque()).append(session)
        db.refresh()
        if block.wait_ms:
            self._ticket += 1
            heappush(self._deadlines, (elapsed_ms + block.wait_ms, self._ticket, session, block))

    def leave(self, session: Session) -> Block | None:
        """The session waits no longer. Returns what it waited for; None if it did not wait."""
        db = self._places.pop(session, None)
        block, session.blocked = session.blocked, None
        if db is None or block is None:
            return None
        for key in dict.fromkeys(block.keys):
            queue = db.blocked[key]
            queue.remove(session)
            if not queue:
                del db.blocked[key]
        db.refresh()
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._places):
            self._deadlines = [one for one in self._deadlines if one[2].blocked is one[3]]
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
        """Those whose deadline has come, the earliest first. They still have to ``leave``."""
        due = []
        while (deadline_ms := self.next_deadline()) is not None and deadline_ms <= elapsed_ms:
            due.append(heappop(self._deadlines)[2])
        return due
