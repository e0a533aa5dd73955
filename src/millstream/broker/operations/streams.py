"""Streams: adding, deleting, trimming and reading entries. What is atomic is one command, or one MULTI/EXEC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream.broker.bulk import SameShape, same_shape
from millstream.broker.context import Context, Limits
from millstream.broker.failures import typed
from millstream.broker.operations.conversion import (
    Fields,
    Id,
    Name,
    add_fields,
    block_words,
    bound_word,
    by_stream,
    count_word,
    counter_word,
    entry_id,
    field_words,
    id_word,
    id_words,
    ids_or_errors,
    name_word,
    new_id_word,
    position_word,
    sequence,
    trim_words,
)
from millstream.broker.operations.conversion import entries as read_entries
from millstream.broker.operations.durability import Wanted, durability_of, send_durably
from millstream.broker.steps.leases.call import fenced_write
from millstream.broker.steps.retention.call import keep_short
from millstream.errors import DurabilityUnavailable, InvalidArgument, MillstreamError, OutOfMemory, PayloadTooLarge
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply


def xadd(
    context: Context,
    stream: Name,
    fields: Fields,
    *,
    id: Id = "*",
    trim: TrimPolicy | None = None,
    create: bool = True,
    durability: Wanted = None,
) -> Conversation[EntryId]:
    key = name_word(stream, "stream")
    head = [b"XADD", key, *(() if create else (b"NOMKSTREAM",)), *trim_words(trim), new_id_word(id)]
    command = Command(tuple(add_fields(head, fields, context.limits.max_entry_bytes)), key)
    if context.guard is not None:
        reply = yield from fenced_write(context, command, durability_of(durability))
    else:
        reply = (yield command) if durability is None else (yield from _one_durably(context, command, durability))
    if reply is None:
        return None  # type: ignore[return-value]  # only with create=False: typed as the common case, where it cannot be
    if context.max_stream_len is not None:
        yield from keep_short(context, key, 1)
    return entry_id(reply)


def xadd_at_once(context: Context, now: Callable[[Args], Any], stream: Name, fields: Fields) -> EntryId | None:
    """``xadd`` without options where the answer comes at once: no conversation is needed for one question.

    None, and nothing was done, behind a guard, and when the stream is due to be trimmed: that takes the long way.
    """
    if context.guard is not None:
        return None
    key = name_word(stream, "stream")
    words = tuple(add_fields([b"XADD", key, b"*"], fields, context.limits.max_entry_bytes))
    if context.max_stream_len is not None:
        left = context.until_trim.get(key, 0) - 1
        if left <= 0:
            return None
        context.until_trim[key] = left
    return entry_id(now(words))


def _one_durably(context: Context, command: Command, durability: Wanted) -> Conversation[Any]:
    wanted = durability_of(durability)
    if wanted is None:
        return (yield command)
    assert command.key is not None
    (reply,), unconfirmed = yield from send_durably(context, command.key, [command.args], wanted)
    if isinstance(reply, ErrorReply):
        raise typed(reply)
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
) -> Conversation[list[EntryId]]:
    key = name_word(stream, "stream")
    head = (b"XADD", key, *trim_words(trim), b"*")
    commands = entry_commands(head, sequence(entries, "entries", "mappings from field names to values"), context.limits)
    if not commands:
        return []
    if atomic:
        size = commands.size() if isinstance(commands, SameShape) else sum(sum(map(len, words)) for words in commands)
        if size > context.limits.max_atomic_bytes:
            raise PayloadTooLarge("entries", size, context.limits.max_atomic_bytes)
    wanted = durability_of(durability)
    ids: list[Any]
    unconfirmed: DurabilityUnavailable | None = None
    if wanted is None:
        ids = yield Batch(commands, key, atomic, reading=ids_or_errors)
    else:
        ids, unconfirmed = yield from send_durably(context, key, commands, wanted, atomic=atomic, reading=ids_or_errors)
    if ErrorReply in set(map(type, ids)):
        raise _with_ids(*_first_failure(ids))
    if unconfirmed is not None:
        raise _with_ids(unconfirmed, ids)
    if context.max_stream_len is not None:
        yield from keep_short(context, key, len(ids))
    return ids


def entry_commands(head: Args, entries: Sequence[Fields], limits: Limits) -> Sequence[Args]:
    """One command for each entry, every entry checked; as columns where all are of one shape."""
    return same_shape(head, entries, limits.max_entry_bytes) or [
        (*head, *field_words(fields, limits)) for fields in entries
    ]


def _first_failure(results: Sequence[EntryId | ErrorReply]) -> tuple[MillstreamError, list[EntryId | None]]:
    errors = [result for result in results if isinstance(result, ErrorReply)]
    ids = [None if isinstance(result, ErrorReply) else result for result in results]
    error = typed(errors[0])
    if isinstance(error, OutOfMemory) and len(errors) < len(ids):
        error = OutOfMemory(
            f"{errors[0].text.rstrip('.')}. {len(ids) - len(errors)} of {len(ids)} entries were stored before it: "
            "``ids`` tells which. Trim streams, or raise maxmemory."
        )
    return error, ids


def _with_ids(error: MillstreamError, ids: Sequence[EntryId | None]) -> MillstreamError:
    error.__dict__["ids"] = list(ids)
    return error


def xdel(context: Context, stream: Name, ids: Sequence[Id] | Id) -> Conversation[int]:
    key = name_word(stream, "stream")
    words = id_words(ids)
    if not words:
        return 0
    gone: int = yield Command((b"XDEL", key, *words), key)
    return gone


def xtrim(context: Context, stream: Name, policy: TrimPolicy) -> Conversation[int]:
    key = name_word(stream, "stream")
    if not isinstance(policy, TrimPolicy):
        raise InvalidArgument("policy", policy, "a TrimPolicy such as TrimPolicy(max_len=1000)")
    gone: int = yield Command((b"XTRIM", key, *policy.words()), key)
    return gone


def xsetid(
    context: Context, stream: Name, last_id: Id, *, entries_added: int | None = None, max_deleted: Id | None = None
) -> Conversation[None]:
    key = name_word(stream, "stream")
    words: Args = (
        *(b"XSETID", key, id_word(last_id, "last_id")),
        *(() if entries_added is None else (b"ENTRIESADDED", counter_word(entries_added, "entries_added"))),
        *(() if max_deleted is None else (b"MAXDELETEDID", id_word(max_deleted, "max_deleted"))),
    )
    yield Command(words, key, repeatable=True)


# --- reading: nothing here changes anything, so a link may repeat all of it ---


def xlen(context: Context, stream: Name) -> Conversation[int]:
    key = name_word(stream, "stream")
    length: int = yield Command((b"XLEN", key), key, repeatable=True)
    return length


def xrange(
    context: Context, stream: Name, start: Id = "-", end: Id = "+", *, count: int | None = None
) -> Conversation[list[Entry]]:
    key = name_word(stream, "stream")
    limit = () if count is None else (b"COUNT", count_word(count))
    reply = yield Command(
        (b"XRANGE", key, bound_word(start, "start"), bound_word(end, "end"), *limit), key, repeatable=True
    )
    return read_entries(reply)


def xrevrange(
    context: Context, stream: Name, end: Id = "+", start: Id = "-", *, count: int | None = None
) -> Conversation[list[Entry]]:
    key = name_word(stream, "stream")
    limit = () if count is None else (b"COUNT", count_word(count))
    reply = yield Command(
        (b"XREVRANGE", key, bound_word(end, "end"), bound_word(start, "start"), *limit), key, repeatable=True
    )
    return read_entries(reply)


def entries_at(context: Context, stream: Name, ids: Sequence[Id]) -> Conversation[list[Entry | None]]:
    """The entries with these ids, None for one that is gone, in one round trip."""
    key = name_word(stream, "stream")
    words = id_words(ids)
    if not words:
        return []
    replies = yield Batch([(b"XRANGE", key, word, word) for word in words], key, repeatable=True)
    if failed := [reply for reply in replies if isinstance(reply, ErrorReply)]:
        raise typed(failed[0])
    return [read_entries(reply)[0] if reply else None for reply in replies]


def xread(
    context: Context, streams: Mapping[str, Id], *, count: int | None = None, block_ms: int | None = None
) -> Conversation[dict[str, list[Entry]]]:
    if not isinstance(streams, Mapping) or not streams:
        raise InvalidArgument("streams", streams, "a mapping from streams to ids, with at least one stream")
    keys = [name_word(stream, "streams") for stream in streams]
    positions = [position_word(after, "streams") for after in streams.values()]
    limit = () if count is None else (b"COUNT", count_word(count))
    reply = yield Command(
        (b"XREAD", *limit, *block_words(block_ms), b"STREAMS", *keys, *positions),
        keys[0],
        # A repeated "$" would start at a later place, and miss what came in between.
        repeatable=b"$" not in positions,
        block_ms=block_ms,
    )
    return {name: read_entries(items) for name, items in by_stream(reply)}
