"""Effects: commands that reproduce the state of an engine, in another engine or in Redis 7.0.

A journal rewrite and a migration to another server both consist of the effects of the current state.
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
    from millstream.engine.stream.group import Group, PendingInfo
    from millstream.engine.stream.stream import Stream


MAX_ARGS_PER_EFFECT: Final = 64
"""Commands of moderate length, as in Redis's own AOF rewrite, so that every client and server can process them."""

Args = tuple[bytes, ...]
Effect = tuple[int, Args]
"""A database number, and a command with explicit ids and times, so that every replay makes the same change."""


def snapshot(engine: Engine) -> Iterator[list[Effect]]:
    """Yields the effects of all databases, in units. The engine must not change during the iteration."""
    for database in engine.databases:
        for key in database.values:
            yield from ([(database.index, args)] for args in effects_of_key(database, key))


def effects_of_key(database: Database, key: bytes) -> Iterator[Args]:
    """Yields the commands that create this key: first its value, then its time to live."""
    yield from effects_of_value(key, database.values[key])
    at_ms = database.expires.get(key)
    if at_ms is not None:
        yield (b"PEXPIREAT", key, b"%d" % at_ms)


def effects_of_value(key: bytes, value: Any) -> Iterator[Args]:
    if isinstance(value, bytes):
        yield (b"SET", key, value)
    elif isinstance(value, dict):
        yield from _chunked(b"HSET", key, (arg for pair in value.items() for arg in pair))
    elif isinstance(value, deque):
        yield from _chunked(b"RPUSH", key, value)
    elif isinstance(value, set | frozenset):
        yield from _chunked(b"SADD", key, sorted(value))
    elif isinstance(value, SortedSet):
        yield from value.effects(key)
    else:
        yield from _stream(key, value)


def _chunked(name: bytes, key: bytes, args: Iterable[bytes]) -> Iterator[Args]:
    remaining = iter(args)
    while part := tuple(islice(remaining, MAX_ARGS_PER_EFFECT)):
        yield (name, key, *part)


MAX_IDS_PER_CLAIM: Final = 100
"""Commands of moderate length, so that each is replayed quickly."""


def _stream(key: bytes, stream: Stream) -> Iterator[Args]:
    """Yields the commands that create a stream.

    The order is: entries, groups with their pending lists, deletions, counters. Entries that were deleted but are still
    pending are added temporarily, because XCLAIM makes only an existing entry pending; the deletions remove them.
    """
    deleted_ids = _deleted_but_pending(stream)
    if not stream.length and not deleted_ids:
        # An empty stream can only be created together with a group, which is then destroyed.
        yield (b"XGROUP", b"CREATE", key, b"", b"0-0", b"MKSTREAM")
        yield (b"XGROUP", b"DESTROY", key, b"")
    yield from _entries(key, stream, deleted_ids)
    for group in stream.groups_by_name():
        yield from _group(key, group)
    yield from _deletions(key, stream, deleted_ids)
    yield from _counters(key, stream)


def _deleted_but_pending(stream: Stream) -> list[int]:
    pending_ids = {entry_id for group in stream.groups.values() for entry_id, _ in group.pending.items()}
    return sorted(entry_id for entry_id in pending_ids if not stream.has(entry_id))


def _entries(key: bytes, stream: Stream, deleted_ids: list[int]) -> Iterator[Args]:
    remaining_ids = iter([*deleted_ids, ID_MAX + 1])
    deleted_id = next(remaining_ids)
    for node in stream.nodes:
        numbered = zip(node.ids(node.skip, node.total), node.entries(node.skip, node.total), strict=True)
        for entry_id, (raw, args) in numbered:
            while deleted_id < entry_id:
                yield (b"XADD", key, format_id(deleted_id), b"", b"")
                deleted_id = next(remaining_ids)
            yield (b"XADD", key, raw, *args)
    while deleted_id <= ID_MAX:
        yield (b"XADD", key, format_id(deleted_id), b"", b"")
        deleted_id = next(remaining_ids)


def _deletions(key: bytes, stream: Stream, deleted_ids: list[int]) -> Iterator[Args]:
    """Yields the commands that remove the temporary entries.

    Entries before the first existing one are trimmed, not deleted: XDEL would set the stream's max-deleted-id, and
    XSETID cannot reset that to 0 for a stream from which nothing was ever deleted.
    """
    if not deleted_ids:
        return
    first_id = stream.first_id
    if not stream.length:
        yield (b"XTRIM", key, b"MAXLEN", b"=", b"0")
        return
    if deleted_ids[0] < first_id:
        yield (b"XTRIM", key, b"MINID", b"=", format_id(first_id))
    for deleted_id in deleted_ids:
        if deleted_id > first_id:
            yield (b"XDEL", key, format_id(deleted_id))


def _group(key: bytes, group: Group) -> Iterator[Args]:
    name = group.name
    reads = b"%d" % group.entries_read
    yield (b"XGROUP", b"CREATE", key, name, format_id(group.last_id), b"ENTRIESREAD", reads)
    for consumer in group.consumers_by_name():
        yield (b"XGROUP", b"CREATECONSUMER", key, name, consumer.name)
        # Entries that were delivered together have the same time and count, so that one XCLAIM covers all of them.
        for _, batch in groupby(consumer.pending.items(), key=lambda item: item[1][1:]):
            items = list(batch)
            yield from claims(key, name, [entry_id for entry_id, _ in items], items[0][1])


def claims(key: bytes, group: bytes, ids: list[int], info: PendingInfo) -> Iterator[Args]:
    """Yields the XCLAIM commands that make these entries pending with this consumer, time and delivery count."""
    consumer, time_ms, count = info
    head = (b"XCLAIM", key, group, consumer.name, b"0")
    tail = (b"TIME", b"%d" % time_ms, b"RETRYCOUNT", b"%d" % count, b"FORCE", b"JUSTID")
    for first in range(0, len(ids), MAX_IDS_PER_CLAIM):
        yield (*head, *map(format_id, ids[first : first + MAX_IDS_PER_CLAIM]), *tail)


def _counters(key: bytes, stream: Stream) -> Iterator[Args]:
    last_id = format_id(stream.last_id)
    added = (b"ENTRIESADDED", b"%d" % stream.entries_added)
    if not stream.max_deleted_id:
        yield (b"XSETID", key, last_id, *added)
        return
    deleted_id = format_id(stream.max_deleted_id)
    if stream.max_deleted_id > stream.last_id:
        # XSETID set the last id back after the deletion. It accepts no MAXDELETEDID beyond the last id, so two steps.
        yield (b"XSETID", key, deleted_id, *added, b"MAXDELETEDID", deleted_id)
        yield (b"XSETID", key, last_id)
    else:
        yield (b"XSETID", key, last_id, *added, b"MAXDELETEDID", deleted_id)
