"""Numbered databases of keys and values: types and encodings, SCAN cursors, keyspace notification flags."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from zlib import crc32

from millstream.engine.glob import glob
from millstream.engine.numbers import SYNTAX_ERROR, parse_int, read_int
from millstream.engine.sorted_set import SortedSet
from millstream.wire import ErrorReply

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.session import Session


MAX_LISTPACK_VALUE_BYTES: Final = 64
MAX_HASH_LISTPACK_ENTRIES: Final = 512
MAX_SORTED_SET_LISTPACK_ENTRIES: Final = 128
MAX_INTSET_ENTRIES: Final = 512
MAX_EMBEDDED_STRING_BYTES: Final = 44

_TYPES: Final[dict[type, bytes]] = {
    type(None): b"none",
    bytes: b"string",
    dict: b"hash",
    deque: b"list",
    set: b"set",
    SortedSet: b"zset",
}


def type_of(value: Any) -> bytes:
    return _TYPES.get(type(value), b"stream")


def encoding_of(value: Any) -> bytes:
    if isinstance(value, bytes):
        if read_int(value) is not None:
            return b"int"
        return b"embstr" if len(value) <= MAX_EMBEDDED_STRING_BYTES else b"raw"
    if isinstance(value, dict):
        return b"listpack" if is_small_hash(value) else b"hashtable"
    if isinstance(value, deque):
        return b"quicklist"
    if isinstance(value, set):
        return b"intset" if is_small_set(value) else b"hashtable"
    if isinstance(value, SortedSet):
        small = len(value) <= MAX_SORTED_SET_LISTPACK_ENTRIES and all(
            len(name) <= MAX_LISTPACK_VALUE_BYTES for name in value.scores
        )
        return b"listpack" if small else b"skiplist"
    return b"stream"


def is_small_hash(value: dict[bytes, bytes]) -> bool:
    """Whether Redis stores the hash as a listpack, so that HSCAN returns all of it in one page."""
    return len(value) <= MAX_HASH_LISTPACK_ENTRIES and all(
        len(name) <= MAX_LISTPACK_VALUE_BYTES and len(text) <= MAX_LISTPACK_VALUE_BYTES for name, text in value.items()
    )


def is_small_set(value: set[bytes]) -> bool:
    return len(value) <= MAX_INTSET_ENTRIES and all(read_int(member) is not None for member in value)


V = TypeVar("V")

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Database:
    """A numbered database. Handlers read with ``find`` or ``find_as``, change values in place, and then call
    ``engine.modified``."""

    __slots__ = ("blocked", "engine", "expires", "index", "observed", "values", "watchers")

    def __init__(self, engine: Engine, index: int) -> None:
        self.engine = engine
        self.index = index
        self.values: dict[bytes, Any] = {}
        """bytes: a string; dict: a hash; deque: a list; set; SortedSet; Stream. Only a stream may be empty."""
        self.expires: dict[bytes, int] = {}
        """Key to the last millisecond at which it exists. Set with ``expire_at``, which also schedules the expiry."""
        self.watchers: dict[bytes, set[Session]] = {}
        self.blocked: dict[bytes, deque[Session]] = {}
        """Key to the sessions that are blocked on it, in order of arrival."""
        self.observed = False
        """Whether changes must be reported: to watching or blocked sessions, or to the memory account."""

    def find(self, key: bytes) -> Any:
        """The value, or None. An expired key is removed first, and the removal is recorded."""
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
        """``find`` for commands that only read: counts hits and misses, and notifies of a miss."""
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
        """Adds a key that does not exist. The caller calls ``engine.modified``."""
        self.values[key] = value
        self.engine.notify(self, NEW, b"new", key)

    def remove(self, key: bytes) -> bool:
        """Removes the key without notifications; the caller calls ``engine.modified``."""
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None

    def expire_at(self, key: bytes, at_ms: int) -> None:
        """Lets an existing key expire after ``at_ms``."""
        self.expires[key] = at_ms
        self.engine.expiry.add(at_ms, self.index, key)

    def refresh(self) -> None:
        """Updates ``observed``. To be called when a watch, a wait or the memory limit starts or ends."""
        self.observed = bool(self.watchers) or bool(self.blocked) or self.engine.memory.limit > 0


MAX_SCAN_ORDERS: Final = 16

ScanTarget = tuple[int, bytes | None]
"""A database number, and the key whose members are scanned; None to scan the keys of the database."""


class ScanOrders:
    """The sorted names of recent scans, so that each page of a scan need not sort them again."""

    __slots__ = ("_orders",)

    def __init__(self) -> None:
        self._orders: dict[ScanTarget, list[tuple[int, bytes]]] = {}

    def page(self, target: ScanTarget, names: Iterable[bytes], cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor (0: the end) and ``count`` names, or more if several share a cursor position.

        Names may have been removed since. The first call of a scan sorts the current names, so that no scan misses
        names that existed when it started.
        """
        order = self._orders.pop(target, None) if cursor else None
        if order is None:
            order = sorted((crc32(name) + 1, name) for name in names)
        start = bisect_left(order, (cursor,))
        end = min(start + count, len(order))
        while 0 < end < len(order) and order[end][0] == order[end - 1][0]:
            end += 1
        next_cursor = order[end][0] if end < len(order) else 0
        if next_cursor:
            self._keep(target, order)
        return next_cursor, [name for _, name in order[start:end]]

    def _keep(self, target: ScanTarget, order: list[tuple[int, bytes]]) -> None:
        self._orders.pop(target, None)
        self._orders[target] = order
        while len(self._orders) > MAX_SCAN_ORDERS:
            del self._orders[next(iter(self._orders))]


_CURSOR: Final = re.compile(rb"([+-]?)0*([0-9]{1,20})")


class ScanOptions:
    """The options of SCAN, HSCAN, SSCAN and ZSCAN."""

    __slots__ = ("count", "kind", "matches")

    def __init__(self, args: Sequence[bytes], *, with_type: bool = False) -> None:
        self.matches: Callable[[bytes], bool] = _matches_all
        self.count = 10
        self.kind: bytes | None = None
        for at in range(0, len(args), 2):
            name = args[at].upper()
            if at + 1 == len(args):
                raise ErrorReply(SYNTAX_ERROR)
            if name == b"COUNT":
                self.count = parse_int(args[at + 1])
                if self.count < 1:
                    raise ErrorReply(SYNTAX_ERROR)
            elif name == b"MATCH":
                self.matches = glob(args[at + 1]).matches
            elif name == b"TYPE" and with_type:
                self.kind = args[at + 1].lower()
            else:
                raise ErrorReply(SYNTAX_ERROR)


def _matches_all(name: bytes) -> bool:
    return True


def parse_cursor(raw: bytes) -> int:
    """As Redis reads it: an empty cursor is 0."""
    if not raw:
        return 0
    match = _CURSOR.fullmatch(raw)
    if match is None or int(match[2]) >= 2**64:
        raise ErrorReply("ERR invalid cursor")
    return int(match[1] + match[2]) % 2**64


# --- keyspace notifications -------------------------------------------------------------------------------------------

KEYSPACE: Final = 1
KEYEVENT: Final = 2
GENERIC: Final = 4
STRING: Final = 8
LIST: Final = 16
SET: Final = 32
HASH: Final = 64
SORTED_SET: Final = 128
EXPIRED: Final = 256
EVICTED: Final = 512
STREAM: Final = 1024
KEY_MISS: Final = 2048
MODULE: Final = 8192
NEW: Final = 16384

ALL: Final = GENERIC | STRING | LIST | SET | HASH | SORTED_SET | EXPIRED | EVICTED | STREAM | MODULE
"""The classes that ``A`` enables: all except key misses and new keys."""

_LETTERS: Final = (
    ("g", GENERIC),
    ("$", STRING),
    ("l", LIST),
    ("s", SET),
    ("h", HASH),
    ("z", SORTED_SET),
    ("x", EXPIRED),
    ("e", EVICTED),
    ("t", STREAM),
    ("d", MODULE),
    ("n", NEW),
)
_ALWAYS_SHOWN: Final = (("K", KEYSPACE), ("E", KEYEVENT), ("m", KEY_MISS))


def parse_flags(text: str) -> int | None:
    """The flags of the letters; None if a letter is unknown."""
    known = {"A": ALL, **dict(_LETTERS), **dict(_ALWAYS_SHOWN)}
    flags = 0
    for letter in text:
        if letter not in known:
            return None
        flags |= known[letter]
    return flags


def format_flags(flags: int) -> str:
    """The letters in Redis's order. ``A`` replaces the letters of its classes, and Redis then omits ``n`` too."""
    classes = "A" if flags & ALL == ALL else "".join(letter for letter, bit in _LETTERS if flags & bit)
    return classes + "".join(letter for letter, bit in _ALWAYS_SHOWN if flags & bit)
