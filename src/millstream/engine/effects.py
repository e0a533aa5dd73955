"""The whole state as effects: commands that make it again, in our engine or in a Redis 7.0.

They are the shortest journal that leads to it: rewriting and migration are made of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

from millstream.engine.sorted_set import SortedSet
from millstream.engine.stream.ids import ID_MAX, format_id

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.engine.keyspace import Database
    from millstream.engine.stream.group import Group, Holding
    from millstream.engine.stream.stream import Stream


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
    elif isinstance(value, SortedSet):
        yield from value.effects(key)
    else:
        yield from _stream(key, value)


def _in_parts(name: bytes, key: bytes, words: Iterable[bytes]) -> Iterator[Words]:
    rest = iter(words)
    while part := tuple(islice(rest, WORDS_PER_EFFECT)):
        yield (name, key, *part)


IDS_PER_CLAIM: Final = 100
"""Commands of moderate length, so that nobody who reads them back waits long for one."""


def _stream(key: bytes, stream: Stream) -> Iterator[Words]:
    """In this order: entries, and among them for a moment those that are gone but still pending, because only an entry
    that is there can be made pending; the pending lists; the gone ones go; then the counters."""
    ghosts = _gone_but_pending(stream)
    if not stream.length and not ghosts:
        # A stream without entries is made by a group, which goes again at once.
        yield (b"XGROUP", b"CREATE", key, b"", b"0-0", b"MKSTREAM")
        yield (b"XGROUP", b"DESTROY", key, b"")
    yield from _entries(key, stream, ghosts)
    for group in stream.groups_by_name():
        yield from _group(key, group)
    yield from _farewell(key, stream, ghosts)
    yield _counters(key, stream)


def _gone_but_pending(stream: Stream) -> list[int]:
    held = {entry_id for group in stream.groups.values() for entry_id, _ in group.pending.items()}
    return sorted(entry_id for entry_id in held if not stream.has(entry_id))


def _entries(key: bytes, stream: Stream, ghosts: list[int]) -> Iterator[Words]:
    waiting = iter([*ghosts, ID_MAX + 1])
    ghost = next(waiting)
    for node in stream.nodes:
        numbered = zip(node.ids(node.skip, node.total), node.entries(node.skip, node.total), strict=True)
        for entry_id, (raw, words) in numbered:
            while ghost < entry_id:
                yield (b"XADD", key, format_id(ghost), b"", b"")
                ghost = next(waiting)
            yield (b"XADD", key, raw, *words)
    while ghost <= ID_MAX:
        yield (b"XADD", key, format_id(ghost), b"", b"")
        ghost = next(waiting)


def _farewell(key: bytes, stream: Stream, ghosts: list[int]) -> Iterator[Words]:
    """Those before the first entry are trimmed away, not deleted: a deletion would leave its mark in the counters, and
    where nothing was ever deleted, XSETID cannot take that mark away."""
    if not ghosts:
        return
    first_id = stream.first_id
    if not stream.length:
        yield (b"XTRIM", key, b"MAXLEN", b"=", b"0")
        return
    if ghosts[0] < first_id:
        yield (b"XTRIM", key, b"MINID", b"=", format_id(first_id))
    for ghost in ghosts:
        if ghost > first_id:
            yield (b"XDEL", key, format_id(ghost))


def _group(key: bytes, group: Group) -> Iterator[Words]:
    name = group.name
    reads = b"%d" % group.entries_read
    yield (b"XGROUP", b"CREATE", key, name, format_id(group.last_id), b"ENTRIESREAD", reads)
    for consumer in group.consumers_by_name():
        yield (b"XGROUP", b"CREATECONSUMER", key, name, consumer.name)
        # What was delivered together has one time and one count: one command for many, as it was when they were read.
        for _, alike in groupby(consumer.pending.items(), key=lambda held: held[1][1:]):
            held = list(alike)
            yield from claims(key, name, [entry_id for entry_id, _ in held], held[0][1])


def claims(key: bytes, group: bytes, ids: list[int], holding: Holding) -> Iterator[Words]:
    """The commands that make these entries pending just so."""
    consumer, time_ms, count = holding
    head = (b"XCLAIM", key, group, consumer.name, b"0")
    tail = (b"TIME", b"%d" % time_ms, b"RETRYCOUNT", b"%d" % count, b"FORCE", b"JUSTID")
    for first in range(0, len(ids), IDS_PER_CLAIM):
        yield (*head, *map(format_id, ids[first : first + IDS_PER_CLAIM]), *tail)


def _counters(key: bytes, stream: Stream) -> Words:
    words = (b"XSETID", key, format_id(stream.last_id), b"ENTRIESADDED", b"%d" % stream.entries_added)
    return words if not stream.max_deleted_id else (*words, b"MAXDELETEDID", format_id(stream.max_deleted_id))
