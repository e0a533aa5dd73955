"""The pending list: who holds what for how long, and taking it over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.broker.context import Context
from millstream.broker.failures import typed
from millstream.broker.operations.conversion import (
    Id,
    Name,
    bound_word,
    count_word,
    deliveries,
    entry_id,
    entry_ids,
    id_word,
    mapping,
    name_word,
    sequence,
)
from millstream.errors import InvalidArgument
from millstream.model import Claimed, Delivery, EntryId, PendingEntry, PendingSummary
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply, to_name


def xpending(context: Context, stream: Name, group: Name) -> Conversation[PendingSummary]:
    key = name_word(stream, "stream")
    count, low, high, owners = yield Command((b"XPENDING", key, name_word(group, "group")), key, repeatable=True)
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
) -> Conversation[list[PendingEntry]]:
    key = name_word(stream, "stream")
    words: Args = (
        *(b"XPENDING", key, name_word(group, "group")),
        *(() if min_idle_ms is None else (b"IDLE", count_word(min_idle_ms, "min_idle_ms", least=0))),
        *(bound_word(start, "start"), bound_word(end, "end"), count_word(count)),
        *(() if consumer is None else (name_word(consumer, "consumer"),)),
    )
    reply = yield Command(words, key, repeatable=True)
    found = [PendingEntry(entry_id(raw), to_name(owner), idle, times) for raw, owner, idle, times in reply]
    if not with_entries or not found:
        return found
    looks = yield Batch([(b"XRANGE", key, raw, raw) for raw, *_ in reply], key, repeatable=True)
    if failed := [look for look in looks if isinstance(look, ErrorReply)]:
        raise typed(failed[0])
    return [one._replace(fields=mapping(look[0][1]) if look else None) for one, look in zip(found, looks, strict=True)]


def _claim_options(
    idle_ms: int | None, time_ms: int | None, retry_count: int | None, last_id: Id | None, *, force: bool
) -> list[bytes]:
    if idle_ms is not None and time_ms is not None:
        raise InvalidArgument("time_ms", time_ms, "either idle_ms or time_ms")
    options: list[bytes] = []
    for word, number, argument in (
        (b"IDLE", idle_ms, "idle_ms"),
        (b"TIME", time_ms, "time_ms"),
        (b"RETRYCOUNT", retry_count, "retry_count"),
    ):
        if number is not None:
            options += (word, count_word(number, argument, least=0))
    if force:
        options.append(b"FORCE")
    if last_id is not None:
        options += (b"LASTID", id_word(last_id, "last_id"))
    return options


def _claim_words(
    stream: Name, group: Name, consumer: Name, ids: Sequence[Id] | Id, min_idle_ms: int, options: list[bytes]
) -> Args:
    many = [ids] if isinstance(ids, (EntryId, str, bytes)) else sequence(ids, "ids", "ids")
    given = [id_word(one, "ids") for one in many]
    if not given:
        raise InvalidArgument("ids", ids, "at least one id")
    return (
        *(b"XCLAIM", name_word(stream, "stream"), name_word(group, "group"), name_word(consumer, "consumer")),
        *(count_word(min_idle_ms, "min_idle_ms", least=0), *given, *options),
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
) -> Conversation[list[Delivery]]:
    options = _claim_options(idle_ms, time_ms, retry_count, last_id, force=force)
    words = _claim_words(stream, group, consumer, ids, min_idle_ms, options)
    reply = yield Command(words, words[1])
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
) -> Conversation[list[EntryId]]:
    options = _claim_options(idle_ms, time_ms, retry_count, last_id, force=force)
    words = _claim_words(stream, group, consumer, ids, min_idle_ms, options)
    reply = yield Command((*words, b"JUSTID"), words[1])
    return entry_ids(reply)


def _autoclaim_words(stream: Name, group: Name, consumer: Name, min_idle_ms: int, start: Id, count: int) -> Args:
    return (
        *(b"XAUTOCLAIM", name_word(stream, "stream"), name_word(group, "group"), name_word(consumer, "consumer")),
        *(count_word(min_idle_ms, "min_idle_ms", least=0), bound_word(start, "start"), b"COUNT", count_word(count)),
    )


def _deleted(reply: Any) -> list[EntryId]:
    return entry_ids(reply[2]) if len(reply) > 2 else []  # before 7.0 the server does not tell


def xautoclaim(
    context: Context,
    stream: Name,
    group: Name,
    consumer: Name,
    *,
    min_idle_ms: int,
    start: Id = "0-0",
    count: int = 100,
) -> Conversation[Claimed]:
    words = _autoclaim_words(stream, group, consumer, min_idle_ms, start, count)
    reply = yield Command(words, words[1])
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
) -> Conversation[tuple[EntryId, list[EntryId], list[EntryId]]]:
    words = _autoclaim_words(stream, group, consumer, min_idle_ms, start, count)
    reply = yield Command((*words, b"JUSTID"), words[1])
    return entry_id(reply[0]), entry_ids(reply[1]), _deleted(reply)
