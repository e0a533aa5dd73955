"""What a value is called: its type, and the encoding that Redis would have chosen for it."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from millstream.engine.numbers import read_int
from millstream.engine.sorted_set import SortedSet

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
