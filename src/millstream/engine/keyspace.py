"""One numbered database: keys, their values, their times to live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from millstream.engine.pubsub import KEY_MISS, NEW
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from collections import deque

    from millstream.engine.engine import Engine
    from millstream.engine.session import Session

V = TypeVar("V")

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Database:
    """Handlers read with ``find`` and ``find_as``, change values in place, and then say ``engine.modified``."""

    __slots__ = ("attended", "blocked", "engine", "expires", "index", "values", "watchers")

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.values: dict[bytes, Any] = {}
        """bytes: a string; dict: a hash; deque: a list; set; SortedSet; Stream. Only a stream may be empty."""
        self.expires: dict[bytes, int] = {}
        """Key to the last millisecond at which it is there. Set with ``expire_at``, so that it is removed in time."""
        self.watchers: dict[bytes, set[Session]] = {}
        self.blocked: dict[bytes, deque[Session]] = {}
        """Key to the sessions that wait for it, in order of arrival."""
        self.attended = False
        """Whether somebody must be told of changes: a watcher, a waiter, or the account of memory."""

    def find(self, key: bytes) -> Any:
        """The value, or None. A key whose time has come is removed first, and its removal is recorded."""
        if (
            self.expires
            and (at := self.expires.get(key)) is not None
            and at < self.engine.now_ms
            and not self.engine.loading
        ):
            self.engine.expire(self, key)
            return None
        return self.values.get(key)

    def find_as(self, key: bytes, kind: type[V]) -> V | None:
        """The value, or None; WRONGTYPE if it is of another kind."""
        value = self.find(key) if self.expires else self.values.get(key)
        if value is None or type(value) is kind:
            return value
        raise ErrorReply(WRONG_TYPE)

    def read(self, key: bytes) -> Any:
        """``find`` for commands that only read: hits and misses are counted, and a miss can be heard."""
        value = self.find(key)
        if value is None:
            self.engine.stats.keyspace_misses += 1
            self.engine.notify(self, KEY_MISS, b"keymiss", key)
        else:
            self.engine.stats.keyspace_hits += 1
        return value

    def read_as(self, key: bytes, kind: type[V]) -> V | None:
        """``read``, and WRONGTYPE if it is of another kind."""
        value = self.read(key)
        if value is None or type(value) is kind:
            return value
        raise ErrorReply(WRONG_TYPE)

    def add(self, key: bytes, value: Any) -> None:
        """A key that was not there. The caller says ``engine.modified``."""
        self.values[key] = value
        self.engine.notify(self, NEW, b"new", key)

    def remove(self, key: bytes) -> bool:
        """Takes the key away without telling anybody; the caller says ``engine.modified``."""
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None

    def expire_at(self, key: bytes, at_ms: int) -> None:
        """The key, which exists, is gone after ``at_ms``."""
        self.expires[key] = at_ms
        self.engine.expiry.add(at_ms, self.index, key)

    def refresh(self) -> None:
        """To be called after a change of anything that decides whether changes are attended."""
        self.attended = bool(self.watchers) or bool(self.blocked) or self.engine.memory.limit > 0
