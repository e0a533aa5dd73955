"""The whole state as effects: the shortest journal that leads to it. Rewriting and migration are made of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database

WORDS_PER_EFFECT: Final = 64
"""As Redis's own rewrite does: commands of moderate length, so that no client and no server chokes on one."""

Words = tuple[bytes, ...]
Effect = tuple[int, Words]
"""A database's number, and a command that brings about the change wherever it is replayed: explicit ids and times."""


def snapshot(engine: Engine) -> Iterator[list[Effect]]:
    """Unit by unit, database by database. The engine must not change meanwhile."""
    for database in engine.databases:
        for key in database.values:
            yield from ([(database.index, words)] for words in effects_of_key(database, key))


def effects_of_key(database: Database, key: bytes) -> Iterator[Words]:
    """What makes this key where there is none: its value, then its time to live."""
    yield from effects_of_value(key, database.values[key])
    at_ms = database.expires.get(key)
    if at_ms is not None:
        yield (b"PEXPIREAT", key, b"%d" % at_ms)


def effects_of_value(key: bytes, value: Any) -> Iterator[Words]:
    if isinstance(value, bytes):
        yield (b"SET", key, value)
    elif isinstance(value, dict):
        yield from _in_parts(b"HSET", key, (word for pair in value.items() for word in pair))
    elif isinstance(value, deque):
        yield from _in_parts(b"RPUSH", key, value)
    elif isinstance(value, set | frozenset):
        yield from _in_parts(b"SADD", key, sorted(value))
    else:
        yield from value.effects(key)


def _in_parts(name: bytes, key: bytes, words: Iterable[bytes]) -> Iterator[Words]:
    rest = iter(words)
    while part := tuple(islice(rest, WORDS_PER_EFFECT)):
        yield (name, key, *part)
