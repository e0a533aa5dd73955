"""One numbered database: keys, their values, their times to live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from millstream.wire.replies import ErrorReply

if TYPE_CHECKING:
    from collections import deque

    from millstream.engine.engine import Engine
    from millstream.engine.session import Session

V = TypeVar("V")

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Database:
    """Handlers read with ``find`` and ``find_as``, change values in place, and then say ``engine.modified``."""

    __slots__ = ("blocked", "engine", "expires", "index", "values", "watchers")

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.values: dict[bytes, Any] = {}
        """bytes: a string; dict: a hash; deque: a list; set: a set; SortedSet; Stream."""
        self.expires: dict[bytes, int] = {}
        """Key to the millisecond at which it is gone."""
        self.watchers: dict[bytes, set[Session]] = {}
        self.blocked: dict[bytes, deque[Session]] = {}
        """Key to the sessions that wait for it, in order of arrival."""

    def find(self, key: bytes) -> Any:
        """The value, or None. A key whose time has come is removed first, and its removal is recorded."""
        if self.expires and (at := self.expires.get(key)) is not None and at <= self.engine.now_ms:
            self.engine.expire(self, key)
            return None
        return self.values.get(key)

    def find_as(self, key: bytes, kind: type[V]) -> V | None:
        """The value, or None; WRONGTYPE if it is of another kind."""
        value = self.find(key) if self.expires else self.values.get(key)
        if value is None or type(value) is kind:
            return value  # type: ignore[no-any-return]
        raise ErrorReply(WRONG_TYPE)

    def remove(self, key: bytes) -> bool:
        """Takes the key away without telling anybody; the caller says ``engine.modified``."""
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None
