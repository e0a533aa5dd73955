"""Leases over streams: who is alive, who owns what, and writes that only the owner can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed
from millstream.broker.keys import beside
from millstream.broker.operations.conversion import (
    Id,
    Name,
    count_word,
    field_words,
    id_word,
    name_word,
    pairs,
    sequence,
    value_word,
)
from millstream.broker.operations.durability import run_script_durably
from millstream.broker.steps.script import Script, run_script, script
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import Durability
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply, to_name

TABLE_TTL_MS = 86_400_000
"""A service without members for a day leaves no table behind."""
FORGET_MEMBER_MS = 600_000
"""A dead member's row stays readable for people who look, and goes after ten minutes."""
OWNER_TTL_MS = 7 * 86_400_000
"""An owner record outlives its lease, so that numbers go on growing; the clock takes over where it has gone."""


def heartbeat(
    context: Context, stream: Name, member: Name, *, lease_ms: int, owned: int, capacity: int
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
    now_ms, announced, *rows = yield from run_script(script("member_heartbeat"), keys, argv, repeatable=True)
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def members(context: Context, stream: Name) -> Conversation[tuple[int, int, dict[str, bytes]]]:
    """What a heartbeat tells, for somebody who is no member. Reads only."""
    key, table = name_word(stream, "stream"), beside(stream, "members")
    time, announced, rows = yield Batch(((b"TIME",), (b"XLEN", key), (b"HGETALL", table)), key, repeatable=True)
    _raise_first((time, announced, rows))
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def read_leases(
    context: Context, streams: Sequence[Name], locks: Sequence[bytes] = ()
) -> Conversation[tuple[list[bytes | MillstreamError | None], list[bytes | MillstreamError | None]]]:
    """The owner records of ``streams`` and the values of ``locks``, in one round trip a node. Each answers for itself:
    where a server refused one (its slot is on the way to another node), that one's answer is the error."""
    records = [_owner_key(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    keys = [*records, *(name_word(key, "locks") for key in sequence(locks, "locks", "keys"))]
    if not keys:
        return [], []
    replies = _answers((yield Batch([(b"GET", key) for key in keys], keys=keys, repeatable=True)))
    return replies[: len(records)], replies[len(records) :]


def renew_leases(
    context: Context, records: Sequence[bytes], locks: Sequence[bytes] = (), *, lock_ttl_ms: int
) -> Conversation[tuple[list[bytes | MillstreamError | None], list[bytes | MillstreamError | None]]]:
    """The same for owner records by their keys (``Guard.key``), which a member of ten thousand streams has ready; and
    as they are read, the records' and the locks' times to live start anew."""
    record_ttl, lock_ttl = b"%d" % OWNER_TTL_MS, count_word(lock_ttl_ms, "lock_ttl_ms")
    keys = [*sequence(records, "records", "keys"), *sequence(locks, "locks", "keys")]
    if not keys:
        return [], []
    commands: list[Args] = [(b"GETEX", key, b"PX", record_ttl) for key in records]
    commands += [(b"GETEX", key, b"PX", lock_ttl) for key in locks]
    replies = _answers((yield Batch(commands, keys=keys, repeatable=True)))
    return replies[: len(records)], replies[len(records) :]


def take_leases(
    context: Context, member: Name, wanted: Sequence[tuple[Name, bytes | None]]
) -> Conversation[list[int | MillstreamError | None]]:
    """Takes each stream whose owner record still is the one given with it: the new token's number, else None.

    Each stream is one atomic step of its own, and answers for itself: of two rivals one wins, and what a server refused
    is an error in its place. Not safe to repeat: a repeat may find itself.
    """
    word = name_word(member, "member")
    calls = [
        ((_owner_key(stream, "wanted"),), (word, _record(record, "wanted"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(wanted, "wanted", "pairs of a stream and its owner record")
    ]
    replies = yield from _run_each(script("lease_take"), calls)
    return [reply if isinstance(reply, MillstreamError) else int(reply[1]) if reply[0] else None for reply in replies]


def release_leases(context: Context, held: Sequence[tuple[Name, bytes]]) -> Conversation[list[bool | MillstreamError]]:
    """Gives each stream back whose owner record still is the one given with it. Each answers for itself."""
    calls = [
        ((_owner_key(stream, "held"),), (_record(record, "held"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(held, "held", "pairs of a stream and its owner record")
    ]
    replies = yield from _run_each(script("lease_release"), calls)
    return [reply if isinstance(reply, MillstreamError) else bool(reply) for reply in replies]


def release_lease(context: Context, stream: Name, record: bytes) -> Conversation[bool]:
    """Gives the stream back if its owner record still is ``record``."""
    [released] = yield from release_leases(context, [(name_word(stream, "stream"), _record(record, "record"))])
    if isinstance(released, MillstreamError):
        raise released
    return released


def lock_keys(
    context: Context, keys: Sequence[bytes], value: Name, *, ttl_ms: int
) -> Conversation[list[bool | MillstreamError]]:
    """SET NX for each key: True where the lock is this value's now, or was already. Each answers for itself."""
    word, ttl = name_word(value, "value"), count_word(ttl_ms, "ttl_ms")
    keys = [name_word(key, "keys") for key in sequence(keys, "keys", "keys")]
    if not keys:
        return []
    commands = [(b"SET", key, word, b"NX", b"GET", b"PX", ttl) for key in keys]
    replies = _answers((yield Batch(commands, keys=keys, repeatable=True)))
    return [reply if isinstance(reply, MillstreamError) else reply is None or reply == word for reply in replies]


def unlock_keys(context: Context, keys: Sequence[bytes], value: Name) -> Conversation[int]:
    """Removes those of the locks that still hold this value; returns how many. The others run out by themselves."""
    word = name_word(value, "value")
    keys = [name_word(key, "keys") for key in sequence(keys, "keys", "keys")]
    replies = yield from _run_each(script("lock_release"), [((key,), (word,)) for key in keys])
    return sum(reply for reply in replies if not isinstance(reply, MillstreamError))


def finish_announcement(context: Context, stream: Name, group: Name, member: Name, id: Id) -> Conversation[bool]:
    """Acknowledges and deletes an entry, if it is still handed to this member. One atomic step."""
    key = name_word(stream, "stream")
    argv = [name_word(group, "group"), name_word(member, "member"), id_word(id)]
    return bool((yield from run_script(script("balancer_finish"), [key], argv)))


def bury_announcement(
    context: Context, stream: Name, group: Name, id: Id, fields: Mapping[bytes, bytes], reason: str
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
            (b"XADD", letters, b"MAXLEN", b"~", b"10000", b"*", *field_words(described, context.limits)),
            (b"XACK", key, name_word(group, "group"), word),
            (b"XDEL", key, word),
        ),
        key,
        atomic=True,
    )
    _raise_first(replies)


def fenced_write(context: Context, command: Command, wanted: Durability | None = None) -> Conversation[Any]:
    """An XADD or XACK behind the context's guard, in one atomic step. Raises StaleOwner, having done nothing, where the
    owner record is another by now."""
    name, key, *words = command.args
    argv = (name, *words)
    return (yield from run_script_durably(context, script("write"), (key,), argv, wanted, guard=context.guard))


def _owner_key(stream: Name, argument: str) -> bytes:
    return beside(name_word(stream, argument), "owner")


def _record(record: bytes | None, argument: str) -> bytes:
    """An owner record as it was read; none is told as an empty one."""
    if record is None or isinstance(record, bytes):
        return record or b""
    raise InvalidArgument(argument, record, "an owner record as bytes")


# --- many at once ---


def _answers(replies: Sequence[Any]) -> list[Any]:
    """Each stream's answer, or its error. Where nobody has answered anything else, the first error is everybody's."""
    answers = [typed(reply) if isinstance(reply, ErrorReply) else reply for reply in replies]
    if all(isinstance(answer, MillstreamError) for answer in answers):
        raise answers[0]
    return answers


def _run_each(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Conversation[list[Any]]:
    """One script for many keys, one round trip a node."""
    if not calls:
        return []
    return _answers((yield _script_batch(chosen, calls)))


def _script_batch(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Batch:
    return Batch([chosen.words(keys, argv) for keys, argv in calls], keys=[keys[0] for keys, _ in calls])


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed(reply)
