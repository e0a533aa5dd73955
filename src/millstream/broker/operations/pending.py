"""Operations on pending entries: inspecting and claiming them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed_error
from millstream.broker.operations.conversion import (
    Id,
    Name,
    bound_arg,
    count_arg,
    deliveries,
    entry_id,
    entry_ids,
    id_arg,
    mapping,
    name_arg,
    sequence,
)
from millstream.errors import InvalidArgument
from millstream.model import Claimed, Delivery, EntryId, PendingEntry, PendingSummary
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, to_name


def xpending(context: Context, stream: Name, group: Name) -> Operation[PendingSummary]:
    key = name_arg(stream, "stream")
    count, low, high, owners = yield Command((b"XPENDING", key, name_arg(group, "group")), key, repeatable=True)
    return PendingSummary(
        count,
        entry_id(low) if low else None,
        entry_id(high) if high else None,
        {to_name(owner): int(number) for owner, number in owners or ()},
    )


def xpending_range(
    context: Context,
    stream: Name,
    group: Name,
    *,
    start: Id = "-",
    end: Id = "+",
    count: int = 100,
    consumer: Name | None = None,
    min_idle_ms: int | None = None,
    with_entries: bool = False,
) -> Operation[list[PendingEntry]]:
    key = name_arg(stream, "stream")
    args: Args = (
        b"XPENDING",
        key,
        name_arg(group, "group"),
        *(() if min_idle_ms is None else (b"IDLE", count_arg(min_idle_ms, "min_idle_ms", least=0))),
        bound_arg(start, "start"),
        bound_arg(end, "end"),
        count_arg(count),
        *(() if consumer is None else (name_arg(consumer, "consumer"),)),
    )
    reply = yield Command(args, key, repeatable=True)
    pending = [PendingEntry(entry_id(raw), to_name(owner), idle, times) for raw, owner, idle, times in reply]
    if not with_entries or not pending:
        return pending
    ranges = yield Batch([(b"XRANGE", key, raw, raw) for raw, *_ in reply], key, repeatable=True)
    if errors := [entries for entries in ranges if isinstance(entries, ErrorReply)]:
        raise typed_error(errors[0])
    return [
        item._replace(fields=mapping(entries[0][1]) if entries else None)
        for item, entries in zip(pending, ranges, strict=True)
    ]


def _claim_options(
    idle_ms: int | None, time_ms: int | None, retry_count: int | None, last_id: Id | None, *, force: bool
) -> list[bytes]:
    if idle_ms is not None and time_ms is not None:
        raise InvalidArgument("time_ms", time_ms, "either idle_ms or time_ms")
    options: list[bytes] = []
    for option, number, argument in (
        (b"IDLE", idle_ms, "idle_ms"),
        (b"TIME", time_ms, "time_ms"),
        (b"RETRYCOUNT", retry_count, "retry_count"),
    ):
        if number is not None:
            options += (option, count_arg(number, argument, least=0))
    if force:
        options.append(b"FORCE")
    if last_id is not None:
        options += (b"LASTID", id_arg(last_id, "last_id"))
    return options


def _claim_args(
    stream: Name, group: Name, consumer: Name, ids: Sequence[Id] | Id, min_idle_ms: int, options: list[bytes]
) -> Args:
    items = [ids] if isinstance(ids, (EntryId, str, bytes)) else sequence(ids, "ids", "ids")
    id_args = [id_arg(item, "ids") for item in items]
    if not id_args:
        raise InvalidArgument("ids", ids, "at least one id")
    return (
        b"XCLAIM",
        name_arg(stream, "stream"),
        name_arg(group, "group"),
        name_arg(consumer, "consumer"),
        count_arg(min_idle_ms, "min_idle_ms", least=0),
        *id_args,
        *options,
    )


def xclaim(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[Id] | Id,
    *,
    min_idle_ms: int,
    idle_ms: int | None = None,
    time_ms: int | None = None,
    retry_count: int | None = None,
    force: bool = False,
    last_id: Id | None = None,
) -> Operation[list[Delivery]]:
    options = _claim_options(idle_ms, time_ms, retry_count, last_id, force=force)
    args = _claim_args(stream, group, consumer, ids, min_idle_ms, options)
    reply = yield Command(args, args[1])
    return deliveries([item for item in reply if item])


def xclaim_ids(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    ids: Sequence[Id] | Id,
    *,
    min_idle_ms: int,
    idle_ms: int | None = None,
    time_ms: int | None = None,
    retry_count: int | None = None,
    force: bool = False,
    last_id: Id | None = None,
) -> Operation[list[EntryId]]:
    options = _claim_options(idle_ms, time_ms, retry_count, last_id, force=force)
    args = _claim_args(stream, group, consumer, ids, min_idle_ms, options)
    reply = yield Command((*args, b"JUSTID"), args[1])
    return entry_ids(reply)


def _autoclaim_args(stream: Name, group: Name, consumer: Name, min_idle_ms: int, start: Id, count: int) -> Args:
    return (
        b"XAUTOCLAIM",
        name_arg(stream, "stream"),
        name_arg(group, "group"),
        name_arg(consumer, "consumer"),
        count_arg(min_idle_ms, "min_idle_ms", least=0),
        bound_arg(start, "start"),
        b"COUNT",
        count_arg(count),
    )


def _deleted(reply: Any) -> list[EntryId]:
    return entry_ids(reply[2]) if len(reply) > 2 else []  # Redis before 7.0 does not report them


def xautoclaim(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    start: Id = "0-0",
    count: int = 100,
) -> Operation[Claimed]:
    args = _autoclaim_args(stream, group, consumer, min_idle_ms, start, count)
    reply = yield Command(args, args[1])
    claimed = [Delivery(entry_id(item[0]), mapping(item[1])) for item in reply[1] if item]
    return Claimed(entry_id(reply[0]), claimed, _deleted(reply))


def xautoclaim_ids(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    start: Id = "0-0",
    count: int = 100,
) -> Operation[tuple[EntryId, list[EntryId], list[EntryId]]]:
    args = _autoclaim_args(stream, group, consumer, min_idle_ms, start, count)
    reply = yield Command((*args, b"JUSTID"), args[1])
    return entry_id(reply[0]), entry_ids(reply[1]), _deleted(reply)
