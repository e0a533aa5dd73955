"""Information on streams, groups and consumers: XINFO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream.engine.numbers import parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.stream import UNKNOWN_READS, Consumer, Group, Stream, reading
from millstream.engine.stream.group import lag
from millstream.engine.stream.ids import ID_MAX, format_id
from millstream.engine.stream.reading import to_text
from millstream.wire import ErrorReply, Map, Reply, Status

DEFAULT_FULL_COUNT: Final = 10
"""The number of entries and pending entries in FULL without COUNT."""

_HELP: Final = (
    b"XINFO <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    b"CONSUMERS <key> <groupname>",
    b"    Show consumers of <groupname>.",
    b"GROUPS <key>",
    b"    Show the stream consumer groups.",
    b"STREAM <key> [FULL [COUNT <count>]",
    b"    Show information about the stream.",
    b"HELP",
    b"    Prints this help.",
)


@command("XINFO|HELP", arity=2)
def xinfo_help(session: Session, args: Sequence[bytes]) -> Reply:
    return [Status(line) for line in _HELP]


def _stream(session: Session, key: bytes) -> Stream:
    stream = session.db.read_as(key, Stream)
    if stream is None:
        raise ErrorReply("ERR no such key")
    return stream


@command("XINFO|STREAM", arity=-3, flags=Flag.READONLY, keys=(2, 2, 1))
def xinfo_stream(session: Session, args: Sequence[bytes]) -> Reply:
    stream = _stream(session, args[2])
    if len(args) == 3:
        edges = (reading.entries(stream, 0, ID_MAX, 1), reading.entries_back(stream, 0, ID_MAX, 1))
        first, last = (edge[0] if edge else None for edge in edges)
        summary = {b"groups": len(stream.groups), b"first-entry": first, b"last-entry": last}
        return Map.of(_stream_info(stream) | summary)
    if args[3].upper() != b"FULL" or len(args) not in (4, 6):
        raise _syntax(args)
    count = DEFAULT_FULL_COUNT
    if len(args) == 6:
        if args[4].upper() != b"COUNT":
            raise _syntax(args)
        count = parse_int(args[5])
        if count < 0:
            count = DEFAULT_FULL_COUNT
    groups = [_full_group(stream, group, count) for group in stream.groups_by_name()]
    return Map.of(_stream_info(stream) | {b"entries": reading.entries(stream, 0, ID_MAX, count), b"groups": groups})


def _syntax(args: Sequence[bytes]) -> ErrorReply:
    return ErrorReply(
        f"ERR unknown subcommand or wrong number of arguments for '{to_text(args[1])[:128]}'. Try XINFO HELP."
    )


def _stream_info(stream: Stream) -> dict[bytes, Reply]:
    return {
        b"length": stream.length,
        b"radix-tree-keys": len(stream.nodes),
        b"radix-tree-nodes": stream.radix_tree_nodes,
        b"last-generated-id": format_id(stream.last_id),
        b"max-deleted-entry-id": format_id(stream.max_deleted_id),
        b"entries-added": stream.entries_added,
        b"recorded-first-entry-id": format_id(stream.first_id),
    }


def _reads(group: Group) -> int | None:
    return None if group.entries_read == UNKNOWN_READS else group.entries_read


def _full_group(stream: Stream, group: Group, count: int) -> Map:
    pending = [
        [format_id(entry_id), consumer.name, time_ms, deliveries]
        for entry_id, (consumer, time_ms, deliveries) in group.pending.page(0, count or len(group.pending))
    ]
    return Map.of(
        {
            b"name": group.name,
            b"last-delivered-id": format_id(group.last_id),
            b"entries-read": _reads(group),
            b"lag": lag(stream, group),
            b"pel-count": len(group.pending),
            b"pending": pending,
            b"consumers": [_full_consumer(consumer, count) for consumer in group.consumers_by_name()],
        }
    )


def _full_consumer(consumer: Consumer, count: int) -> Map:
    pending = [
        [format_id(entry_id), time_ms, deliveries]
        for entry_id, (_, time_ms, deliveries) in consumer.pending.page(0, count or len(consumer.pending))
    ]
    return Map.of(
        {
            b"name": consumer.name,
            b"seen-time": consumer.seen_ms,
            b"pel-count": len(consumer.pending),
            b"pending": pending,
        }
    )


@command("XINFO|GROUPS", arity=3, flags=Flag.READONLY, keys=(2, 2, 1))
def xinfo_groups(session: Session, args: Sequence[bytes]) -> Reply:
    stream = _stream(session, args[2])
    return [
        Map.of(
            {
                b"name": group.name,
                b"consumers": len(group.consumers),
                b"pending": len(group.pending),
                b"last-delivered-id": format_id(group.last_id),
                b"entries-read": _reads(group),
                b"lag": lag(stream, group),
            }
        )
        for group in stream.groups_by_name()
    ]


@command("XINFO|CONSUMERS", arity=4, flags=Flag.READONLY, keys=(2, 2, 1))
def xinfo_consumers(session: Session, args: Sequence[bytes]) -> Reply:
    group = _stream(session, args[2]).groups.get(args[3])
    if group is None:
        raise ErrorReply(f"NOGROUP No such consumer group '{to_text(args[3])}' for key name '{to_text(args[2])}'")
    now_ms = session.engine.now_ms
    return [
        Map.of(
            {
                b"name": consumer.name,
                b"pending": len(consumer.pending),
                b"idle": max(now_ms - consumer.seen_ms, 0),
            }
        )
        for consumer in group.consumers_by_name()
    ]
