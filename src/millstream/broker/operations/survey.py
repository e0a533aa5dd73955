"""Many streams at a glance, in a few round trips however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.broker.context import Context
from millstream.broker.operations.answers import entry_id, mapping
from millstream.broker.operations.arguments import Name, name_word, sequence
from millstream.model.entry_id import EntryId
from millstream.wire.commands import Args, Batch, Conversation
from millstream.wire.names import to_name
from millstream.wire.replies import ErrorReply


class GroupSurvey(NamedTuple):
    """``oldest_pending`` is the smallest id that was handed out and not acknowledged."""

    name: str
    consumers: int
    pending: int
    last_delivered: EntryId
    lag: int | None
    oldest_pending: EntryId | None


class StreamSurvey(NamedTuple):
    name: str
    length: int
    entries_added: int
    last_generated: EntryId
    memory_bytes: int | None
    groups: list[GroupSurvey]


def survey(context: Context, streams: Sequence[Name], *, memory: bool = True) -> Conversation[list[StreamSurvey]]:
    """Length, memory and groups of each stream that exists. Reads only; not a snapshot."""
    keys = [name_word(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    infos = yield from _each([(b"XINFO", b"STREAM", key) for key in keys], keys)
    groups = yield from _each([(b"XINFO", b"GROUPS", key) for key in keys], keys)
    sizes: list[Any] = [None] * len(keys)
    if memory:
        sizes = yield from _each([(b"MEMORY", b"USAGE", key) for key in keys], keys)
    there = [
        (key, mapping(info), [mapping(group) for group in found], size)
        for key, info, found, size in zip(keys, infos, groups, sizes, strict=True)
        if not isinstance(info, ErrorReply) and not isinstance(found, ErrorReply)
    ]
    waiting = [(key, group[b"name"]) for key, _, found, _ in there for group in found if group[b"pending"]]
    summaries = yield from _each([(b"XPENDING", *pair) for pair in waiting], [key for key, _ in waiting])
    oldest = {
        pair: entry_id(summary[1])
        for pair, summary in zip(waiting, summaries, strict=True)
        if not isinstance(summary, ErrorReply) and summary[1]
    }
    return [_stream(key, info, found, size, oldest) for key, info, found, size in there]


def _stream(
    key: bytes, info: dict[bytes, Any], groups: list[dict[bytes, Any]], size: Any, oldest: dict[Any, EntryId]
) -> StreamSurvey:
    return StreamSurvey(
        to_name(key),
        info[b"length"],
        info[b"entries-added"],
        entry_id(info[b"last-generated-id"]),
        size if isinstance(size, int) else None,
        [
            GroupSurvey(
                to_name(group[b"name"]),
                group[b"consumers"],
                group[b"pending"],
                entry_id(group[b"last-delivered-id"]),
                group[b"lag"],
                oldest.get((key, group[b"name"])),
            )
            for group in groups
        ],
    )


def _each(commands: Sequence[Args], keys: Sequence[bytes]) -> Conversation[list[Any]]:
    if not commands:
        return []
    return list((yield Batch(commands, keys=keys, repeatable=True)))
