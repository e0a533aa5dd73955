"""Leases over streams: who is alive, who owns what, and writes that only the owner can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.broker.context import Context as Site
from millstream.broker.failures import code_of, typed
from millstream.broker.keys import beside
from millstream.broker.operations.answers import entries, entry_id
from millstream.broker.operations.arguments import (
    Fields,
    Id,
    Name,
    count_word,
    field_words,
    id_word,
    id_words,
    name_word,
    new_id_word,
    pairs,
    sequence,
    value_word,
)
from millstream.broker.operations.trimming import added
from millstream.broker.scripts import Guard, Script, load_script, run_script, script
from millstream.errors import InvalidArgument
from millstream.model.entries import Entry
from millstream.model.entry_id import EntryId
from millstream.wire.commands import Args, Batch, Conversation
from millstream.wire.names import to_name
from millstream.wire.replies import ErrorReply

TABLE_TTL_MS = 86_400_000
"""A service without members for a day leaves no table behind."""
FORGET_MEMBER_MS = 600_000
"""A dead member's row stays readable for people who look, and goes after ten minutes."""
OWNER_TTL_MS = 7 * 86_400_000
"""An owner record outlives its lease, so that numbers go on growing; the clock takes over where it has gone."""


def member_beat(
    site: Site, stream: Name, member: Name, *, lease_ms: int, owned: int, capacity: int
) -> Conversation[tuple[int, int, dict[str, bytes]]]:
    """A member of the load-balancer ``stream`` is alive for ``lease_ms`` more; 0 takes it off the table.

    One atomic step; safe to repeat. Returns the server's time, the number of announced streams, and the table.
    """
    key = name_word(stream, "stream")
    argv = [
        name_word(member, "member"),
        *(count_word(lease_ms, "lease_ms", least=0), count_word(owned, "owned", least=0)),
        count_word(capacity, "capacity", least=0),
        *(b"%d" % TABLE_TTL_MS, b"%d" % FORGET_MEMBER_MS),
    ]
    keys = [beside(stream, "members"), key]
    now_ms, announced, *rows = yield from run_script(script("member_beat"), keys, argv, repeatable=True)
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def members(site: Site, stream: Name) -> Conversation[tuple[int, int, dict[str, bytes]]]:
    """What a beat tells, for somebody who is no member. Reads only."""
    key, table = name_word(stream, "stream"), beside(stream, "members")
    time, announced, rows = yield Batch(((b"TIME",), (b"XLEN", key), (b"HGETALL", table)), key, repeatable=True)
    _raise_first((time, announced, rows))
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def read_leases(
    site: Site, streams: Sequence[Name], locks: Sequence[bytes] = (), *, lock_ttl_ms: int | None = None
) -> Conversation[tuple[list[bytes | None], list[bytes | None]]]:
    """The owner records of ``streams`` and the values of ``locks``, in one round trip a node.

    With ``lock_ttl_ms`` the records' and the locks' times to live start anew as they are read.
    """
    records = [_owner_key(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    locks = [name_word(key, "locks") for key in sequence(locks, "locks", "keys")]
    if lock_ttl_ms is None:
        commands: list[Args] = [(b"GET", key) for key in [*records, *locks]]
    else:
        commands = [(b"GETEX", key, b"PX", b"%d" % OWNER_TTL_MS) for key in records]
        ttl = count_word(lock_ttl_ms, "lock_ttl_ms")
        commands += [(b"GETEX", key, b"PX", ttl) for key in locks]
    replies = yield from _each(commands, [*records, *locks])
    return replies[: len(records)], replies[len(records) :]


def take_leases(
    site: Site, member: Name, wanted: Sequence[tuple[Name, bytes | None]]
) -> Conversation[list[int | None]]:
    """Takes each stream whose owner record still is the one given with it: the new token's number, else None.

    Each stream is one atomic step of its own: of two rivals one wins. Not safe to repeat: a repeat may find itself.
    """
    word = name_word(member, "member")
    calls = [
        ((_owner_key(stream, "wanted"),), (word, _record(record, "wanted"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(wanted, "wanted", "pairs of a stream and its owner record")
    ]
    replies = yield from _run_each(script("lease_take"), calls)
    return [int(answer) if won else None for won, answer in replies]


def release_leases(site: Site, held: Sequence[tuple[Name, bytes]]) -> Conversation[list[bool]]:
    """Gives each stream back whose owner record still is the one given with it."""
    calls = [
        ((_owner_key(stream, "held"),), (_record(record, "held"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(held, "held", "pairs of a stream and its owner record")
    ]
    return [bool(reply) for reply in (yield from _run_each(script("lease_release"), calls))]


def release_lease(site: Site, stream: Name, record: bytes) -> Conversation[bool]:
    [released] = yield from release_leases(site, [(name_word(stream, "stream"), _record(record, "record"))])
    return released


def lock_keys(site: Site, keys: Sequence[bytes], value: Name, *, ttl_ms: int) -> Conversation[list[bool]]:
    """SET NX for each key: True where the lock is this value's now, or was already."""
    word, ttl = name_word(value, "value"), count_word(ttl_ms, "ttl_ms")
    keys = [name_word(key, "keys") for key in sequence(keys, "keys", "keys")]
    replies = yield from _each([(b"SET", key, word, b"NX", b"GET", b"PX", ttl) for key in keys], keys)
    return [reply is None or reply == word for reply in replies]


def unlock_keys(site: Site, keys: Sequence[bytes], value: Name) -> Conversation[int]:
    """Removes those of the locks that still hold this value."""
    word = name_word(value, "value")
    keys = [name_word(key, "keys") for key in sequence(keys, "keys", "keys")]
    return sum((yield from _run_each(script("lock_release"), [((key,), (word,)) for key in keys])))


def entries_at(site: Site, stream: Name, ids: Sequence[Id]) -> Conversation[list[Entry | None]]:
    """The entries with these ids, None for one that is gone, in one round trip."""
    key = name_word(stream, "stream")
    words = id_words(ids)
    replies = yield from _each([(b"XRANGE", key, word, word) for word in words], [key] * len(words))
    return [entries(reply)[0] if reply else None for reply in replies]


def finish_announcement(site: Site, stream: Name, group: Name, member: Name, id: Id) -> Conversation[bool]:
    """Acknowledges and deletes an entry, if it is still handed to this member. One atomic step."""
    key = name_word(stream, "stream")
    argv = [name_word(group, "group"), name_word(member, "member"), id_word(id)]
    return bool((yield from run_script(script("balancer_finish"), [key], argv)))


def bury_announcement(
    site: Site, stream: Name, group: Name, id: Id, fields: Mapping[bytes, bytes], reason: str
) -> Conversation[None]:
    """Moves an entry that cannot be understood to the dead letters beside the stream. One atomic step."""
    key, word, letters = name_word(stream, "stream"), id_word(id), beside(stream, "dlq")
    if not isinstance(fields, Mapping):
        raise InvalidArgument("fields", fields, "a mapping from field names to values")
    if not isinstance(reason, str) or not reason:
        raise InvalidArgument("reason", reason, "a sentence")
    value_word(reason, "reason")
    described: dict[bytes, bytes | str] = {b"error": reason, b"original_id": word, b"original_stream": key, **fields}
    replies = yield Batch(
        (
            (b"XADD", letters, b"MAXLEN", b"~", b"10000", b"*", *field_words(described, site.limits)),
            (b"XACK", key, name_word(group, "group"), word),
            (b"XDEL", key, word),
        ),
        key,
        atomic=True,
    )
    _raise_first(replies)


def guarded_xadd(
    site: Site, stream: Name, fields: Fields, *, owned: Name, record: bytes, id: str = "*"
) -> Conversation[EntryId]:
    """XADD, refused with StaleOwner unless the owner record beside ``owned`` equals ``record``. One atomic step."""
    words = (new_id_word(id), *field_words(fields, site.limits))
    reply = yield from _guarded(stream, owned, record, b"XADD", words)
    if site.max_stream_len is not None:
        yield from added(site, name_word(stream, "stream"), 1)
    return entry_id(reply)


def guarded_xack(
    site: Site, stream: Name, group: Name, ids: Sequence[Id] | Id, *, owned: Name, record: bytes
) -> Conversation[int]:
    """XACK, refused with StaleOwner unless the owner record beside ``owned`` equals ``record``. One atomic step."""
    words = (name_word(group, "group"), *id_words(ids))
    count: int = yield from _guarded(stream, owned, record, b"XACK", words)
    return count


def _guarded(stream: Name, owned: Name, record: bytes, name: bytes, words: Sequence[bytes]) -> Conversation[Any]:
    guard = Guard(_owner_key(owned, "owned"), _record(record, "record"))
    return (yield from run_script(script("write"), [name_word(stream, "stream")], [name, *words], guard=guard))


def _owner_key(stream: Name, argument: str) -> bytes:
    return beside(name_word(stream, argument), "owner")


def _record(record: bytes | None, argument: str) -> bytes:
    """An owner record as it was read; none is told as an empty one."""
    if record is None or isinstance(record, bytes):
        return record or b""
    raise InvalidArgument(argument, record, "an owner record as bytes")


# --- many at once ---


def _each(commands: Sequence[Args], keys: Sequence[bytes]) -> Conversation[list[Any]]:
    """One round trip a node for commands that are safe to repeat; the first error is raised."""
    if not commands:
        return []
    replies = yield Batch(commands, keys=keys, repeatable=True)
    _raise_first(replies)
    return list(replies)


def _run_each(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Conversation[list[Any]]:
    """One script for many keys, one round trip a node; a node that does not know it is given it, and asked again."""
    if not calls:
        return []
    replies: list[Any] = list((yield _script_batch(chosen, calls)))
    while unknown := [n for n, reply in enumerate(replies) if _is_unknown(reply)]:
        yield from load_script(chosen, calls[unknown[0]][0][0])
        again = yield _script_batch(chosen, [calls[n] for n in unknown])
        for n, reply in zip(unknown, again, strict=True):
            replies[n] = reply
    _raise_first(replies)
    return replies


def _is_unknown(reply: object) -> bool:
    return isinstance(reply, ErrorReply) and code_of(reply) == "NOSCRIPT"


def _script_batch(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Batch:
    return Batch([chosen.words(keys, argv) for keys, argv in calls], keys=[keys[0] for keys, _ in calls])


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed(reply)
