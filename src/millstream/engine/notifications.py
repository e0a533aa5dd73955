"""Keyspace notifications: which kinds are on, and how the setting is written."""

from __future__ import annotations

from typing import Final

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
