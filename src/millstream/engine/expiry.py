"""Times to live: when keys are due, and the words by which commands set it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from millstream.engine.numbers import INT64_MAX, INT64_MIN, SYNTAX_ERROR, parse_int
from millstream.wire import ErrorReply, to_name

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database


class ExpirySchedule:
    """A heap of (last millisecond, database, key). Its entries are hints: what ``Database.expires`` says decides."""

    __slots__ = ("_databases", "_heap")

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._heap: list[tuple[int, int, bytes]] = []

    def add(self, at_ms: int, index: int, key: bytes) -> None:
        # A lease that is renewed leaves its old entries behind; throw them out before they outgrow the real ones.
        if len(self._heap) > 1024 and len(self._heap) > 4 * sum(len(db.expires) for db in self._databases):
            self._heap = [one for one in self._heap if self._is_current(one)]
            heapify(self._heap)
        heappush(self._heap, (at_ms, index, key))

    def next_deadline(self) -> int | None:
        """The first millisecond at which some key is gone."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] + 1 if self._heap else None

    def due(self, now_ms: int, limit: int) -> list[tuple[Database, bytes]]:
        """Up to ``limit`` keys whose time is over, the earliest first."""
        found: list[tuple[Database, bytes]] = []
        while len(found) < limit and (at := self.next_deadline()) is not None and at <= now_ms:
            _, index, key = heappop(self._heap)
            found.append((self._databases[index], key))
        return found

    def _is_current(self, entry: tuple[int, int, bytes]) -> bool:
        at_ms, index, key = entry
        return self._databases[index].expires.get(key) == at_ms


_UNITS = (b"EX", b"PX", b"EXAT", b"PXAT")


class ExpireOptions:
    """What SET and GETEX were told besides key and value. An option may be repeated: the last counts."""

    __slots__ = ("amount", "get", "keep_ttl", "nx", "persist", "unit", "xx")

    def __init__(self) -> None:
        self.nx = self.xx = self.get = self.keep_ttl = self.persist = False
        self.unit: bytes | None = None
        self.amount = b""

    @classmethod
    def for_set(cls, args: Sequence[bytes]) -> ExpireOptions:
        options = cls()
        at = 3
        while at < len(args):
            word = args[at].upper()
            if word == b"NX" and not options.xx:
                options.nx = True
            elif word == b"XX" and not options.nx:
                options.xx = True
            elif word == b"GET":
                options.get = True
            elif word == b"KEEPTTL" and options.unit is None:
                options.keep_ttl = True
            elif word in _UNITS and not options.keep_ttl and options.unit in (None, word) and at + 1 < len(args):
                options.unit, options.amount = word, args[at + 1]
                at += 1
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        return options

    @classmethod
    def for_getex(cls, args: Sequence[bytes]) -> ExpireOptions:
        options = cls()
        at = 2
        while at < len(args):
            word = args[at].upper()
            if word == b"PERSIST" and options.unit is None:
                options.persist = True
            elif word in _UNITS and not options.persist and options.unit in (None, word) and at + 1 < len(args):
                options.unit, options.amount = word, args[at + 1]
                at += 1
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        return options

    @property
    def absolute(self) -> bool:
        return self.unit in (b"EXAT", b"PXAT")

    def at_ms(self, now_ms: int, command_name: str) -> int | None:
        """The moment that was asked for; None if none was. It may be in the past, but not before 1970."""
        if self.unit is None:
            return None
        amount = parse_int(self.amount)
        in_seconds = self.unit in (b"EX", b"EXAT")
        if amount <= 0 or (in_seconds and amount > INT64_MAX // 1000):
            raise ErrorReply(invalid_expire_time(command_name))
        if in_seconds:
            amount *= 1000
        if not self.absolute:
            if amount > INT64_MAX - now_ms:
                raise ErrorReply(invalid_expire_time(command_name))
            amount += now_ms
        return amount


def invalid_expire_time(command_name: str) -> str:
    return f"ERR invalid expire time in '{command_name}' command"


class ExpireCondition:
    """EXPIRE's own options: whether a new time to live may take the place of the old one."""

    __slots__ = ("gt", "lt", "nx", "xx")

    def __init__(self, words: Sequence[bytes]) -> None:
        given = [word.upper() for word in words]
        for word, raw in zip(given, words, strict=True):
            if word not in (b"NX", b"XX", b"GT", b"LT"):
                raise ErrorReply(f"ERR Unsupported option {to_name(raw)}")
        self.nx, self.xx, self.gt, self.lt = (word in given for word in (b"NX", b"XX", b"GT", b"LT"))
        if self.nx and (self.xx or self.gt or self.lt):
            raise ErrorReply("ERR NX and XX, GT or LT options at the same time are not compatible")
        if self.gt and self.lt:
            raise ErrorReply("ERR GT and LT options at the same time are not compatible")

    def allows(self, current: int | None, new: int) -> bool:
        """``current`` is None where the key has no time to live, which counts as infinitely long."""
        if (self.nx and current is not None) or (self.xx and current is None):
            return False
        if self.gt and (current is None or new <= current):
            return False
        return not (self.lt and current is not None and new >= current)


def expire_moment(raw: bytes, now_ms: int, *, seconds: bool, relative: bool, command_name: str) -> int:
    """EXPIRE's moment. It may be in the past, even negative: then the key goes at once."""
    amount = parse_int(raw)
    if seconds:
        if not INT64_MIN // 1000 < amount <= INT64_MAX // 1000:
            raise ErrorReply(invalid_expire_time(command_name))
        amount *= 1000
    if relative:
        if amount > INT64_MAX - now_ms:
            raise ErrorReply(invalid_expire_time(command_name))
        amount += now_ms
    return amount
