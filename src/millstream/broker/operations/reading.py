"""Reading a stream as it lies there: nothing here changes anything, so a link may repeat all of it."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.broker.context import Context
from millstream.broker.operations.answers import by_stream, entries
from millstream.broker.operations.arguments import (
    Id,
    Name,
    block_words,
    bound_word,
    count_word,
    name_word,
    position_word,
)
from millstream.errors import InvalidArgument
from millstream.model.entries import Entry
from millstream.wire.commands import Command, Conversation


def xlen(context: Context, stream: Name) -> Conversation[int]:
    """How many entries the stream holds; 0 where there is no stream."""
    key = name_word(stream, "stream")
    length: int = yield Command((b"XLEN", key), key, repeatable=True)
    return length


def xrange(
    context: Context, stream: Name, start: Id = "-", end: Id = "+", *, count: int | None = None
) -> Conversation[list[Entry]]:
    """Entries from ``start`` to ``end``, both included unless "(" stands before them."""
    key = name_word(stream, "stream")
    limit = () if count is None else (b"COUNT", count_word(count))
    reply = yield Command(
        (b"XRANGE", key, bound_word(start, "start"), bound_word(end, "end"), *limit), key, repeatable=True
    )
    return entries(reply)


def xrevrange(
    context: Context, stream: Name, end: Id = "+", start: Id = "-", *, count: int | None = None
) -> Conversation[list[Entry]]:
    """As ``xrange``, the newest first."""
    key = name_word(stream, "stream")
    limit = () if count is None else (b"COUNT", count_word(count))
    reply = yield Command(
        (b"XREVRANGE", key, bound_word(end, "end"), bound_word(start, "start"), *limit), key, repeatable=True
    )
    return entries(reply)


def xread(
    context: Context, streams: Mapping[str, Id], *, count: int | None = None, block_ms: int | None = None
) -> Conversation[dict[str, list[Entry]]]:
    """Entries after the given ids; "$" means those that arrive from now on. Streams without news are left out.

    Blocks up to ``block_ms`` (None: not at all, 0: for ever). Idempotent. On a cluster the streams share a hash tag.
    """
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
    return {name: entries(items) for name, items in by_stream(reply)}
