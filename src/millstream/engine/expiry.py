"""Times to live: the schedule of expiring keys, and the options by which commands set a time to live."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from millstream.engine.numbers import INT64_MAX, INT64_MIN, SYNTAX_ERROR, parse_int
from millstream.wire import ErrorReply, to_name

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database


class ExpirySchedule:
    """A heap of (last millisecond, database, key). Items may be outdated: ``Database.expires`` decides."""

    __slots__ = ("_databases", "_heap")

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases
        self._heap: list[tuple[int, int, bytes]] = []

    def add(self, at_ms: int, index: int, key: bytes) -> None:
        # Each renewal of a lease leaves an outdated item. Remove them before they outnumber the current ones.
        if len(self._heap) > 1024 and len(self._heap) > 4 * sum(len(db.expires) for db in self._databases):
            self._heap = [item for item in self._heap if self._is_current(item)]
            heapify(self._heap)
        heappush(self._heap, (at_ms, index, key))

    def next_deadline(self) -> int | None:
        """The first millisecond at which a key is expired."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] + 1 if self._heap else None

    def due(self, now_ms: int, limit: int) -> list[tuple[Database, bytes]]:
        """Removes and returns up to ``limit`` expired keys, the earliest first."""
        expired: list[tuple[Database, bytes]] = []
        while len(expired) < limit and (at := self.next_deadline()) is not None and at <= now_ms:
            _, index, key = heappop(self._heap)
            expired.append((self._databases[index], key))
        return expired

    def _is_current(self, entry: tuple[int, int, bytes]) -> bool:
        at_ms, index, key = entry
        return self._databases[index].expires.get(key) == at_ms


_UNITS = (b"EX", b"PX", b"EXAT", b"PXAT")


class ExpireOptions:
    """The options of SET and GETEX. An option may be repeated: the last one counts."""

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
            arg = args[at].upper()
            if arg == b"NX" and not options.xx:
                options.nx = True
            elif arg == b"XX" and not options.nx:
                options.xx = True
            elif arg == b"GET":
                options.get = True
            elif arg == b"KEEPTTL" and options.unit is None:
                options.keep_ttl = True
            elif arg in _UNITS and not options.keep_ttl and options.unit in (None, arg) and at + 1 < len(args):
                options.unit, options.amount = arg, args[at + 1]
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
            arg = args[at].upper()
            if arg == b"PERSIST" and options.unit is None:
                options.persist = True
            elif arg in _UNITS and not options.persist and options.unit in (None, arg) and at + 1 < len(args):
                options.unit, options.amount = arg, args[at + 1]
                at += 1
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        return options

    @property
    def absolute(self) -> bool:
        return self.unit in (b"EXAT", b"PXAT")

    def at_ms(self, now_ms: int, command_name: str) -> int | None:
        """The requested expiry time, None without one. It may be in the past, but not before 1970."""
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
    """The options of EXPIRE: whether a new time to live may replace the old one."""

    __slots__ = ("gt", "lt", "nx", "xx")

    def __init__(self, args: Sequence[bytes]) -> None:
        upper = [arg.upper() for arg in args]
        for arg, raw in zip(upper, args, strict=True):
            if arg not in (b"NX", b"XX", b"GT", b"LT"):
                raise ErrorReply(f"ERR Unsupported option {to_name(raw)}")
        self.nx, self.xx, self.gt, self.lt = (arg in upper for arg in (b"NX", b"XX", b"GT", b"LT"))
        if self.nx and (self.xx or self.gt or self.lt):
            raise ErrorReply("ERR NX and XX, GT or LT options at the same time are not compatible")
        if self.gt and self.lt:
            raise ErrorReply("ERR GT and LT options at the same time are not compatible")

    def allows(self, current: int | None, new: int) -> bool:
        """``current`` is None if the key has no time to live, which counts as infinite."""
        if (self.nx and current is not None) or (self.xx and current is None):
            return False
        if self.gt and (current is None or new <= current):
            return False
        return not (self.lt and current is not None and new >= current)


def parse_expiry_ms(raw: bytes, now_ms: int, *, seconds: bool, relative: bool, command_name: str) -> int:
    """The expiry time that EXPIRE sets. It may be in the past, even negative: then the key is deleted immediately."""
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
