"""Numbered databases of keys and values: what a value is called, how SCAN goes through them, which changes are told."""

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


LISTPACK_VALUE: Final = 64
HASH_LISTPACK_ENTRIES: Final = 512
SORTED_SET_LISTPACK_ENTRIES: Final = 128
INTSET_ENTRIES: Final = 512
EMBEDDED_STRING: Final = 44

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
        return b"embstr" if len(value) <= EMBEDDED_STRING else b"raw"
    if isinstance(value, dict):
        return b"listpack" if is_small_hash(value) else b"hashtable"
    if isinstance(value, deque):
        return b"quicklist"
    if isinstance(value, set):
        return b"intset" if is_small_set(value) else b"hashtable"
    if isinstance(value, SortedSet):
        small = len(value) <= SORTED_SET_LISTPACK_ENTRIES and all(len(name) <= LISTPACK_VALUE for name in value.scores)
        return b"listpack" if small else b"skiplist"
    return b"stream"


def is_small_hash(value: dict[bytes, bytes]) -> bool:
    """Redis keeps it in one piece, so that HSCAN returns all of it at once."""
    return len(value) <= HASH_LISTPACK_ENTRIES and all(
        len(name) <= LISTPACK_VALUE and len(text) <= LISTPACK_VALUE for name, text in value.items()
    )


def is_small_set(value: set[bytes]) -> bool:
    return len(value) <= INTSET_ENTRIES and all(read_int(member) is not None for member in value)


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


KEPT_ORDERS: Final = 16

Place = tuple[int, bytes | None]
"""A database's number, and the key whose members are scanned; None for the keys themselves."""


class ScanOrders:
    __slots__ = ("_orders",)

    def __init__(self) -> None:
        self._orders: dict[Place, list[tuple[int, bytes]]] = {}

    def page(self, place: Place, names: Iterable[bytes], cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor (0: the end) and ``count`` names, or a few more that share a place. Some may be gone by now.

        The first call of a scan takes a new order, so that no scan misses what was there when it began.
        """
        order = self._orders.pop(place, None) if cursor else None
        if order is None:
            order = sorted((crc32(name) + 1, name) for name in names)
        start = bisect_left(order, (cursor,))
        end = min(start + count, len(order))
        while 0 < end < len(order) and order[end][0] == order[end - 1][0]:
            end += 1
        following = order[end][0] if end < len(order) else 0
        if following:
            self._keep(place, order)
        return following, [name for _, name in order[start:end]]

    def _keep(self, place: Place, order: list[tuple[int, bytes]]) -> None:
        self._orders.pop(place, None)
        self._orders[place] = order
        while len(self._orders) > KEPT_ORDERS:
            del self._orders[next(iter(self._orders))]


_CURSOR: Final = re.compile(rb"([+-]?)0*([0-9]{1,20})")


class ScanOptions:
    __slots__ = ("count", "fits", "kind")

    def __init__(self, words: Sequence[bytes], *, with_type: bool = False) -> None:
        self.fits: Callable[[bytes], bool] = _anything
        self.count = 10
        self.kind: bytes | None = None
        for at in range(0, len(words), 2):
            name = words[at].upper()
            if at + 1 == len(words):
                raise ErrorReply(SYNTAX_ERROR)
            if name == b"COUNT":
                self.count = parse_int(words[at + 1])
                if self.count < 1:
                    raise ErrorReply(SYNTAX_ERROR)
            elif name == b"MATCH":
                self.fits = glob(words[at + 1]).matches
            elif name == b"TYPE" and with_type:
                self.kind = words[at + 1].lower()
            else:
                raise ErrorReply(SYNTAX_ERROR)


def _anything(name: bytes) -> bool:
    return True


def parse_cursor(raw: bytes) -> int:
    found = _CURSOR.fullmatch(raw)
    if found is None or int(found[2]) >= 2**64:
        raise ErrorReply("ERR invalid cursor")
    return int(found[1] + found[2]) % 2**64


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
"""What ``A`` stands for: everything but misses and new keys."""

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
    """The flags that the letters stand for; None if one of them stands for nothing."""
    known = {"A": ALL, **dict(_LETTERS), **dict(_ALWAYS_SHOWN)}
    flags = 0
    for letter in text:
        if letter not in known:
            return None
        flags |= known[letter]
    return flags


def format_flags(flags: int) -> str:
    """The letters in Redis's own order; ``A`` stands for all of its kinds, and Redis then leaves ``n`` out too."""
    kinds = "A" if flags & ALL == ALL else "".join(letter for letter, bit in _LETTERS if flags & bit)
    return kinds + "".join(letter for letter, bit in _ALWAYS_SHOWN if flags & bit)
