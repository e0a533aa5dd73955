"""Operations on streams: adding, deleting, trimming and reading entries. Atomic means one command or one MULTI/EXEC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.broker.bulk import UniformCommands, uniform_commands
from millstream.broker.context import Context, Limits
from millstream.broker.failures import typed_error
from millstream.broker.operations.conversion import (
    Fields,
    Id,
    Name,
    add_fields,
    block_args,
    bound_arg,
    by_stream,
    count_arg,
    counter_arg,
    entry_id,
    field_args,
    id_arg,
    id_args,
    ids_or_errors,
    name_arg,
    new_id_arg,
    position_arg,
    sequence,
    trim_args,
)
from millstream.broker.operations.conversion import entries as read_entries
from millstream.broker.operations.durability import Wanted, durability_of, send_durably
from millstream.broker.scripts.leases.call import fenced_write
from millstream.broker.scripts.retention.call import keep_short
from millstream.errors import DurabilityUnavailable, InvalidArgument, MillstreamError, OutOfMemory, PayloadTooLarge
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.wire import Args, Batch, Command, ErrorReply, Operation


def xadd(
    context: Context,
    stream: Name,
    fields: Fields,
    *,
    id: Id = "*",
    trim: TrimPolicy | None = None,
    create: bool = True,
    durability: Wanted = None,
) -> Operation[EntryId]:
    key = name_arg(stream, "stream")
    head = [b"XADD", key, *(() if create else (b"NOMKSTREAM",)), *trim_args(trim), new_id_arg(id)]
    command = Command(tuple(add_fields(head, fields, context.limits.max_entry_bytes)), key)
    if context.fence is not None:
        reply = yield from fenced_write(context, command, durability_of(durability))
    else:
        reply = (yield command) if durability is None else (yield from _xadd_durably(context, command, durability))
    if reply is None:
        return None  # type: ignore[return-value]  # only with create=False; the annotation is for the common case
    if context.max_stream_len is not None:
        yield from keep_short(context, key, 1)
    return entry_id(reply)


def xadd_immediately(context: Context, now: Callable[[Args], Any], stream: Name, fields: Fields) -> EntryId | None:
    """``xadd`` without options on a transport that replies synchronously: no generator is needed.

    Returns None, without adding, on a fenced broker and if the stream is due for a trim: ``xadd`` handles these.
    """
    if context.fence is not None:
        return None
    key = name_arg(stream, "stream")
    args = tuple(add_fields([b"XADD", key, b"*"], fields, context.limits.max_entry_bytes))
    if context.max_stream_len is not None:
        remaining = context.until_trim.get(key, 0) - 1
        if remaining <= 0:
            return None
        context.until_trim[key] = remaining
    return entry_id(now(args))


def _xadd_durably(context: Context, command: Command, durability: Wanted) -> Operation[Any]:
    level = durability_of(durability)
    if level is None:
        return (yield command)
    assert command.key is not None
    (reply,), unconfirmed = yield from send_durably(context, command.key, [command.args], level)
    if isinstance(reply, ErrorReply):
        raise typed_error(reply)
    if unconfirmed is not None and reply is not None:
        raise _with_ids(unconfirmed, [entry_id(reply)])
    return reply


def xadd_many(
    context: Context,
    stream: Name,
    entries: Sequence[Fields],
    *,
    atomic: bool = False,
    trim: TrimPolicy | None = None,
    durability: Wanted = None,
) -> Operation[list[EntryId]]:
    key = name_arg(stream, "stream")
    head = (b"XADD", key, *trim_args(trim), b"*")
    commands = entry_commands(head, sequence(entries, "entries", "mappings from field names to values"), context.limits)
    if not commands:
        return []
    if atomic:
        size = (
            commands.size() if isinstance(commands, UniformCommands) else sum(sum(map(len, args)) for args in commands)
        )
        if size > context.limits.max_atomic_bytes:
            raise PayloadTooLarge("entries", size, context.limits.max_atomic_bytes)
    level = durability_of(durability)
    ids: list[Any]
    unconfirmed: DurabilityUnavailable | None = None
    if level is None:
        ids = yield Batch(commands, key, atomic, reading=ids_or_errors)
    else:
        ids, unconfirmed = yield from send_durably(context, key, commands, level, atomic=atomic, reading=ids_or_errors)
    if ErrorReply in set(map(type, ids)):
        raise _with_ids(*_first_failure(ids))
    if unconfirmed is not None:
        raise _with_ids(unconfirmed, ids)
    if context.max_stream_len is not None:
        yield from keep_short(context, key, len(ids))
    return ids


def entry_commands(head: Args, entries: Sequence[Fields], limits: Limits) -> Sequence[Args]:
    """One command for each entry, all checked; packed as columns if all entries have the same fields."""
    return uniform_commands(head, entries, limits.max_entry_bytes) or [
        (*head, *field_args(fields, limits)) for fields in entries
    ]


def _first_failure(results: Sequence[EntryId | ErrorReply]) -> tuple[MillstreamError, list[EntryId | None]]:
    errors = [result for result in results if isinstance(result, ErrorReply)]
    ids = [None if isinstance(result, ErrorReply) else result for result in results]
    error = typed_error(errors[0])
    if isinstance(error, OutOfMemory) and len(errors) < len(ids):
        error = OutOfMemory(
            f"{errors[0].text.rstrip('.')}. {len(ids) - len(errors)} of {len(ids)} entries were stored before it; "
            "``ids`` has their ids. Trim streams, or raise maxmemory."
        )
    return error, ids


def _with_ids(error: MillstreamError, ids: Sequence[EntryId | None]) -> MillstreamError:
    error.__dict__["ids"] = list(ids)
    return error


def xdel(context: Context, stream: Name, ids: Sequence[Id] | Id) -> Operation[int]:
    key = name_arg(stream, "stream")
    args = id_args(ids)
    if not args:
        return 0
    deleted: int = yield Command((b"XDEL", key, *args), key)
    return deleted


def xtrim(context: Context, stream: Name, policy: TrimPolicy) -> Operation[int]:
    key = name_arg(stream, "stream")
    if not isinstance(policy, TrimPolicy):
        raise InvalidArgument("policy", policy, "a TrimPolicy such as TrimPolicy(max_len=1000)")
    deleted: int = yield Command((b"XTRIM", key, *policy.args()), key)
    return deleted


def xsetid(
    context: Context, stream: Name, last_id: Id, *, entries_added: int | None = None, max_deleted: Id | None = None
) -> Operation[None]:
    key = name_arg(stream, "stream")
    args: Args = (
        b"XSETID",
        key,
        id_arg(last_id, "last_id"),
        *(() if entries_added is None else (b"ENTRIESADDED", counter_arg(entries_added, "entries_added"))),
        *(() if max_deleted is None else (b"MAXDELETEDID", id_arg(max_deleted, "max_deleted"))),
    )
    yield Command(args, key, repeatable=True)


# --- reading: repeatable, because nothing is changed ---


def xlen(context: Context, stream: Name) -> Operation[int]:
    key = name_arg(stream, "stream")
    length: int = yield Command((b"XLEN", key), key, repeatable=True)
    return length


def xrange(
    context: Context, stream: Name, start: Id = "-", end: Id = "+", *, count: int | None = None
) -> Operation[list[Entry]]:
    key = name_arg(stream, "stream")
    limit = () if count is None else (b"COUNT", count_arg(count))
    reply = yield Command(
        (b"XRANGE", key, bound_arg(start, "start"), bound_arg(end, "end"), *limit), key, repeatable=True
    )
    return read_entries(reply)


def xrevrange(
    context: Context, stream: Name, end: Id = "+", start: Id = "-", *, count: int | None = None
) -> Operation[list[Entry]]:
    key = name_arg(stream, "stream")
    limit = () if count is None else (b"COUNT", count_arg(count))
    reply = yield Command(
        (b"XREVRANGE", key, bound_arg(end, "end"), bound_arg(start, "start"), *limit), key, repeatable=True
    )
    return read_entries(reply)


def entries_at(context: Context, stream: Name, ids: Sequence[Id]) -> Operation[list[Entry | None]]:
    """The entries with these ids, None for deleted ones, in one round trip."""
    key = name_arg(stream, "stream")
    args = id_args(ids)
    if not args:
        return []
    replies = yield Batch([(b"XRANGE", key, arg, arg) for arg in args], key, repeatable=True)
    if errors := [reply for reply in replies if isinstance(reply, ErrorReply)]:
        raise typed_error(errors[0])
    return [read_entries(reply)[0] if reply else None for reply in replies]


def xread(
    context: Context, streams: Mapping[str, Id], *, count: int | None = None, block_ms: int | None = None
) -> Operation[dict[str, list[Entry]]]:
    if not isinstance(streams, Mapping) or not streams:
        raise InvalidArgument("streams", streams, "a mapping from streams to ids, with at least one stream")
    keys = [name_arg(stream, "streams") for stream in streams]
    positions = [position_arg(after, "streams") for after in streams.values()]
    limit = () if count is None else (b"COUNT", count_arg(count))
    reply = yield Command(
        (b"XREAD", *limit, *block_args(block_ms), b"STREAMS", *keys, *positions),
        keys[0],
        # A repeated "$" would start at a later id and miss the entries in between.
        repeatable=b"$" not in positions,
        block_ms=block_ms,
    )
    return {name: read_entries(items) for name, items in by_stream(reply)}
