"""A command that waits, as a value, and the room where such values wait: whoever came first is served first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from millstream.wire import NIL_ARRAY, Reply

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database
    from millstream.engine.session import Session


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
