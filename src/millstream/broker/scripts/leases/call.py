"""Leases of streams: live members, owners, and writes that only the owner can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.keys import companion_key
from millstream.broker.operations.conversion import (
    Id,
    Name,
    count_arg,
    field_args,
    id_arg,
    name_arg,
    pairs,
    sequence,
    value_arg,
)
from millstream.broker.operations.durability import run_script_durably
from millstream.broker.scripts.script import Script, run_script, script
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import Durability
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, to_name

TABLE_TTL_MS = 86_400_000
"""The members table expires after a day without members."""
FORGET_MEMBER_MS = 600_000
"""The row of a dead member stays readable for operators for ten minutes."""
OWNER_TTL_MS = 7 * 86_400_000
"""An owner record outlives its lease, so that numbers keep growing. After it has expired, numbers start at the
clock.
"""

FAR_LEASES = 10
"""A lock that lasts this many times longer than usual was written before the server's clock was set back."""


def heartbeat(
    context: Context, stream: Name, member: Name, *, lease_ms: int, owned: int, capacity: int
) -> Operation[tuple[int, int, dict[str, bytes]]]:
    """Extends the membership of ``member`` in the load-balancer ``stream`` by ``lease_ms``; 0 removes it.

    Atomic and repeatable. Returns the server's time, the number of announced streams, and the members table.
    """
    key = name_arg(stream, "stream")
    argv = [
        name_arg(member, "member"),
        count_arg(lease_ms, "lease_ms", least=0),
        count_arg(owned, "owned", least=0),
        count_arg(capacity, "capacity", least=0),
        b"%d" % TABLE_TTL_MS,
        b"%d" % FORGET_MEMBER_MS,
    ]
    keys = [companion_key(stream, "members"), key]
    now_ms, announced, *rows = yield from run_script(script("member_heartbeat"), keys, argv, repeatable=True)
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def members(context: Context, stream: Name) -> Operation[tuple[int, int, dict[str, bytes]]]:
    """The result of ``heartbeat`` for a reader that is not a member. Reads only."""
    key, table = name_arg(stream, "stream"), companion_key(stream, "members")
    time, announced, rows = yield Batch(((b"TIME",), (b"XLEN", key), (b"HGETALL", table)), key, repeatable=True)
    _raise_first((time, announced, rows))
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    return now_ms, announced, {to_name(name): row for name, row in zip(rows[::2], rows[1::2], strict=True)}


def read_leases(
    context: Context, streams: Sequence[Name], locks: Sequence[bytes] = ()
) -> Operation[tuple[list[bytes | MillstreamError | None], list[bytes | MillstreamError | None]]]:
    """The owner records of ``streams`` and the values of ``locks``, in one round trip per node.

    Each has its own result: if a server refused one (its slot is migrating), the error is in its place.
    """
    records = [_owner_key(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    keys = [*records, *(name_arg(key, "locks") for key in sequence(locks, "locks", "keys"))]
    if not keys:
        return [], []
    replies = _replies_or_errors((yield Batch([(b"GET", key) for key in keys], keys=keys, repeatable=True)))
    return replies[: len(records)], replies[len(records) :]


def renew_leases(
    context: Context, records: Sequence[bytes], locks: Sequence[bytes] = (), *, lock_ttl_ms: int
) -> Operation[tuple[list[bytes | MillstreamError | None], list[bytes | MillstreamError | None]]]:
    """As ``read_leases``, for owner records by key (``Fence.key``); also renews the time to live of records and locks.

    A member with ten thousand streams has the keys already and need not compute them.
    """
    record_ttl, lock_ttl = b"%d" % OWNER_TTL_MS, count_arg(lock_ttl_ms, "lock_ttl_ms")
    keys = [*sequence(records, "records", "keys"), *sequence(locks, "locks", "keys")]
    if not keys:
        return [], []
    commands: list[Args] = [(b"GETEX", key, b"PX", record_ttl) for key in records]
    commands += [(b"GETEX", key, b"PX", lock_ttl) for key in locks]
    replies = _replies_or_errors((yield Batch(commands, keys=keys, repeatable=True)))
    return replies[: len(records)], replies[len(records) :]


def take_leases(
    context: Context, member: Name, wanted: Sequence[tuple[Name, bytes | None]]
) -> Operation[list[int | MillstreamError | None]]:
    """Takes the lease of each stream whose owner record has not changed. Returns the new token's number, or None.

    Atomic for each stream, which has its own result: of two competing members one succeeds; an error of the server is
    in the stream's place. Not repeatable: a repeat would see its own first try.
    """
    arg = name_arg(member, "member")
    calls = [
        ((_owner_key(stream, "wanted"),), (arg, _record(record, "wanted"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(wanted, "wanted", "pairs of a stream and its owner record")
    ]
    replies = yield from _run_each(script("lease_take"), calls)
    return [reply if isinstance(reply, MillstreamError) else int(reply[1]) if reply[0] else None for reply in replies]


def release_leases(context: Context, held: Sequence[tuple[Name, bytes]]) -> Operation[list[bool | MillstreamError]]:
    """Releases each stream whose owner record is still the given one. Each has its own result."""
    calls = [
        ((_owner_key(stream, "held"),), (_record(record, "held"), b"%d" % OWNER_TTL_MS))
        for stream, record in pairs(held, "held", "pairs of a stream and its owner record")
    ]
    replies = yield from _run_each(script("lease_release"), calls)
    return [reply if isinstance(reply, MillstreamError) else bool(reply) for reply in replies]


def release_lease(context: Context, stream: Name, record: bytes) -> Operation[bool]:
    """Releases the stream if its owner record is still ``record``."""
    [released] = yield from release_leases(context, [(name_arg(stream, "stream"), _record(record, "record"))])
    if isinstance(released, MillstreamError):
        raise released
    return released


def lock_keys(
    context: Context, keys: Sequence[bytes], value: Name, *, ttl_ms: int
) -> Operation[list[bool | MillstreamError]]:
    """SET NX for each key: True if the lock has this value now, or had it already. Each has its own result."""
    arg, ttl = name_arg(value, "value"), count_arg(ttl_ms, "ttl_ms")
    keys = [name_arg(key, "keys") for key in sequence(keys, "keys", "keys")]
    if not keys:
        return []
    commands = [(b"SET", key, arg, b"NX", b"GET", b"PX", ttl) for key in keys]
    replies = _replies_or_errors((yield Batch(commands, keys=keys, repeatable=True)))
    return [reply if isinstance(reply, MillstreamError) else reply is None or reply == arg for reply in replies]


def limit_locks(context: Context, keys: Sequence[bytes], *, ttl_ms: int) -> Operation[None]:
    """Limits the time to live of locks that last far longer than ``ttl_ms`` to ``ttl_ms``, regardless of the owner.

    For processes that wait for a lock: if the server's clock was set back, the lock of a dead owner would otherwise
    expire only when the clock has caught up. A live owner renews its lock. An owner may use a somewhat longer time.
    """
    ttl = count_arg(ttl_ms, "ttl_ms")
    keys = [name_arg(key, "keys") for key in sequence(keys, "keys", "keys")]
    if not keys:
        return
    lives = _replies_or_errors((yield Batch([(b"PTTL", key) for key in keys], keys=keys, repeatable=True)))
    far = [key for key, life in zip(keys, lives, strict=True) if isinstance(life, int) and life > FAR_LEASES * ttl_ms]
    if far:
        _replies_or_errors((yield Batch([(b"PEXPIRE", key, ttl, b"LT") for key in far], keys=far, repeatable=True)))


def unlock_keys(context: Context, keys: Sequence[bytes], value: Name) -> Operation[int]:
    """Deletes the locks that still have this value; returns how many. The others expire."""
    arg = name_arg(value, "value")
    keys = [name_arg(key, "keys") for key in sequence(keys, "keys", "keys")]
    replies = yield from _run_each(script("lock_release"), [((key,), (arg,)) for key in keys])
    return sum(reply for reply in replies if not isinstance(reply, MillstreamError))


def finish_announcement(context: Context, stream: Name, group: Name, member: Name, id: Id) -> Operation[bool]:
    """Acknowledges and deletes an entry if it is still pending for this member. Atomic."""
    key = name_arg(stream, "stream")
    argv = [name_arg(group, "group"), name_arg(member, "member"), id_arg(id)]
    return bool((yield from run_script(script("balancer_finish"), [key], argv)))


def dead_letter_announcement(
    context: Context, stream: Name, group: Name, id: Id, fields: Mapping[bytes, bytes], reason: str
) -> Operation[None]:
    """Moves an invalid entry to the dead-letter stream of ``stream``. Atomic."""
    key, arg, dead_letters = name_arg(stream, "stream"), id_arg(id), companion_key(stream, "dlq")
    if not isinstance(fields, Mapping):
        raise InvalidArgument("fields", fields, "a mapping from field names to values")
    if not isinstance(reason, str) or not reason:
        raise InvalidArgument("reason", reason, "a sentence")
    value_arg(reason, "reason")
    described: dict[bytes, bytes | str] = {b"error": reason, b"original_id": arg, b"original_stream": key, **fields}
    replies = yield Batch(
        (
            (b"XADD", dead_letters, b"MAXLEN", b"~", b"10000", b"*", *field_args(described, context.limits)),
            (b"XACK", key, name_arg(group, "group"), arg),
            (b"XDEL", key, arg),
        ),
        key,
        atomic=True,
    )
    _raise_first(replies)


def fenced_write(context: Context, command: Command, wanted: Durability | None = None) -> Operation[Any]:
    """An XADD or XACK that is fenced by the context, in one atomic step. Raises StaleOwner if the owner record has
    changed.
    """
    name, key, *args = command.args
    argv = (name, *args)
    return (yield from run_script_durably(context, script("write"), (key,), argv, wanted, fence=context.fence))


def _owner_key(stream: Name, argument: str) -> bytes:
    return companion_key(name_arg(stream, argument), "owner")


def _record(record: bytes | None, argument: str) -> bytes:
    """An owner record for a script: empty if there is none."""
    if record is None or isinstance(record, bytes):
        return record or b""
    raise InvalidArgument(argument, record, "an owner record as bytes")


# --- many keys ---


def _replies_or_errors(replies: Sequence[Any]) -> list[Any]:
    """Converts error replies into typed errors; raises the first if all are errors."""
    results = [typed_error(reply) if isinstance(reply, ErrorReply) else reply for reply in replies]
    if all(isinstance(result, MillstreamError) for result in results):
        raise results[0]
    return results


def _run_each(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Operation[list[Any]]:
    """Runs one script for many keys, in one round trip per node."""
    if not calls:
        return []
    return _replies_or_errors((yield _script_batch(chosen, calls)))


def _script_batch(chosen: Script, calls: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> Batch:
    return Batch([chosen.evalsha_args(keys, argv) for keys, argv in calls], keys=[keys[0] for keys, _ in calls])


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise typed_error(reply)
