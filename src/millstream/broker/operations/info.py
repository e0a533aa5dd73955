"""What the server knows about streams, and about itself. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.broker.context import Context
from millstream.broker.links.targets import NodeName
from millstream.broker.operations.conversion import Name, entries, entry_id, mapping, name_word, sequence
from millstream.errors import MillstreamError, ServerTooOld
from millstream.model import ConsumerInfo, Entry, EntryId, GroupInfo, StreamInfo
from millstream.wire import Args, Batch, Command, Conversation, ErrorReply, to_name

SCAN_STEP = b"1000"


class Facts(dict[bytes, Any]):
    """What XINFO tells of one thing. Raises ServerTooOld for what it does not tell."""

    def __missing__(self, fact: bytes) -> Any:
        raise ServerTooOld(fact.decode())


def _one_entry(item: Any) -> Entry | None:
    return entries([item])[0] if item else None


def stream_info(context: Context, stream: Name) -> Conversation[StreamInfo]:
    key = name_word(stream, "stream")
    facts = Facts(mapping((yield Command((b"XINFO", b"STREAM", key), key, repeatable=True))))
    return StreamInfo(
        name=to_name(key),
        length=facts[b"length"],
        last_generated=entry_id(facts[b"last-generated-id"]),
        entries_added=facts[b"entries-added"],
        max_deleted=entry_id(facts[b"max-deleted-entry-id"]),
        recorded_first=entry_id(facts[b"recorded-first-entry-id"]),
        groups=facts[b"groups"],
        first=_one_entry(facts[b"first-entry"]),
        last=_one_entry(facts[b"last-entry"]),
    )


def group_info(context: Context, stream: Name) -> Conversation[list[GroupInfo]]:
    key = name_word(stream, "stream")
    reply = yield Command((b"XINFO", b"GROUPS", key), key, repeatable=True)
    groups = [Facts(mapping(flat)) for flat in reply]
    if not groups:
        return []
    members = yield Batch([(b"XINFO", b"CONSUMERS", key, facts[b"name"]) for facts in groups], key, repeatable=True)
    return [
        GroupInfo(
            name=to_name(facts[b"name"]),
            pending=facts[b"pending"],
            last_delivered=entry_id(facts[b"last-delivered-id"]),
            entries_read=facts[b"entries-read"],
            lag=facts[b"lag"],
            consumers=[_consumer(mapping(flat)) for flat in consumers],
        )
        for facts, consumers in zip(groups, members, strict=True)
        if not isinstance(consumers, ErrorReply)
    ]


def consumer_info(context: Context, stream: Name, group: Name) -> Conversation[list[ConsumerInfo]]:
    key = name_word(stream, "stream")
    reply = yield Command((b"XINFO", b"CONSUMERS", key, name_word(group, "group")), key, repeatable=True)
    return [_consumer(mapping(flat)) for flat in reply]


def _consumer(facts: dict[bytes, Any]) -> ConsumerInfo:
    return ConsumerInfo(name=to_name(facts[b"name"]), pending=facts[b"pending"], idle_ms=facts[b"idle"])


def list_streams(context: Context, pattern: str = "*") -> Conversation[list[str]]:
    return (yield from _scan(context, pattern, b"TYPE", b"stream"))


def list_keys(context: Context, pattern: str) -> Conversation[list[str]]:
    """Names of all keys of any kind that match the glob, as ``list_streams`` finds streams."""
    return (yield from _scan(context, pattern))


def _scan(context: Context, pattern: str, *options: bytes) -> Conversation[list[str]]:
    glob = name_word(pattern, "pattern")
    nodes: list[bytes | None] = [None]
    if context.cluster:
        slots = yield Command((b"CLUSTER", b"SLOTS"), repeatable=True)
        nodes = [*{NodeName(b"%s:%d" % (primary[0], primary[1])) for _, _, primary, *_ in slots}]
    found: set[bytes] = set()
    for node in nodes:
        cursor = b"0"
        while True:
            words = (b"SCAN", cursor, b"MATCH", glob, b"COUNT", SCAN_STEP, *options)
            cursor, names = yield Command(words, node, repeatable=True)
            found.update(names)
            if cursor == b"0":
                break
    return sorted(map(to_name, found))


def ping(context: Context) -> Conversation[None]:
    yield Command((b"PING",), repeatable=True)


def server_time_ms(context: Context) -> Conversation[int]:
    seconds, micros = yield Command((b"TIME",), repeatable=True)
    return int(seconds) * 1000 + int(micros) // 1000


def server_info(context: Context, section: str = "default") -> Conversation[dict[str, str]]:
    reply: bytes = yield Command((b"INFO", name_word(section, "section")), repeatable=True)
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if line and line[0] != "#")
    return {name: value for name, _, value in lines}


def server_version(context: Context) -> Conversation[tuple[int, ...]]:
    """Such as (7, 0, 15)."""
    facts = yield from server_info(context, "server")
    return tuple(int(part) for part in facts["redis_version"].split(".") if part.isdigit())


def server_setting(context: Context, name: str) -> Conversation[str | None]:
    """CONFIG GET of one setting; None where the server has none of that name. Raises PermissionDenied."""
    reply = yield Command((b"CONFIG", b"GET", name_word(name, "name")), repeatable=True)
    return to_name(reply[1]) if reply else None


def blocked_commands(context: Context, stream: Name) -> Conversation[list[str]]:
    """What the clients wait in that are blocked at the stream's server, such as ``xread``. Raises PermissionDenied."""
    key = name_word(stream, "stream")
    reply: bytes = yield Command((b"CLIENT", b"LIST", b"TYPE", b"NORMAL"), key, repeatable=True)
    clients = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in to_name(reply).splitlines()]
    return [client.get("cmd", "") for client in clients if "b" in client.get("flags", "")]


# --- many streams at a glance, in a few round trips however many there are ---


class GroupSurvey(NamedTuple):
    """``oldest_pending`` is the smallest id that was handed out and not acknowledged."""

    name: str
    consumers: int
    pending: int
    last_delivered: EntryId
    lag: int | None
    oldest_pending: EntryId | None


class StreamSurvey(NamedTuple):
    """``heavy``: XINFO STREAM carries the first and the last entry along, and they are too large for a glance. It is
    not asked then: ``entries_added`` is what a group tells of it, or None, and ``last_generated`` is None."""

    name: str
    length: int
    entries_added: int | None
    last_generated: EntryId | None
    memory_bytes: int | None
    groups: list[GroupSurvey]
    heavy: bool = False


HEAVY_BYTES = 1 << 20
"""Of a whole stream, and of two entries: what a glance at one may cost."""
HEAVY_ENTRY_BYTES = 64 << 10
"""Of an entry on average: a long stream of small ones is large, and not heavy."""


def survey(
    context: Context,
    streams: Sequence[Name],
    *,
    memory: bool = True,
    before: Mapping[str, StreamSurvey] | None = None,
) -> Conversation[list[StreamSurvey]]:
    """Length, memory and groups of each stream that exists. Reads only; not a snapshot. With ``before``, an earlier
    survey, memory that is not asked for is what it was then; of streams that are new it is asked all the same."""
    keys = [name_word(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    known = before or {}
    sizes = {key: known[name].memory_bytes for key in keys if (name := to_name(key)) in known}
    asked = keys if memory else [key for key in keys if key not in sizes] if before is not None else []
    sizes |= zip(asked, (yield from _each([(b"MEMORY", b"USAGE", key) for key in asked], asked)), strict=True)
    infos = yield from _infos(keys, sizes, {} if memory else known)
    groups = yield from _each([(b"XINFO", b"GROUPS", key) for key in keys], keys)
    there = [
        (key, Facts(mapping(info)), [Facts(mapping(group)) for group in found], sizes.get(key))
        for key, info, found in zip(keys, infos, groups, strict=True)
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


def _infos(keys: list[bytes], sizes: Mapping[bytes, Any], known: Mapping[str, StreamSurvey]) -> Conversation[list[Any]]:
    """What XINFO STREAM tells of each; of one whose entries are too large for that, its length alone. The memory tells
    before anything is fetched; an entry that is hidden in a long stream is noticed when it was, and not fetched again
    until the memory is asked for anew."""
    large = [key for key in keys if isinstance(size := sizes.get(key), int) and size > HEAVY_BYTES]
    lengths = dict(zip(large, (yield from _each([(b"XLEN", key) for key in large], large)), strict=True))
    heavy = {
        key
        for key, length in lengths.items()
        if isinstance(length, int)
        and length
        and (sizes[key] > length * HEAVY_ENTRY_BYTES or ((one := known.get(to_name(key))) is not None and one.heavy))
    }
    light = [key for key in keys if key not in heavy]
    infos = dict(zip(light, (yield from _each([(b"XINFO", b"STREAM", key) for key in light], light)), strict=True))
    return [[b"length", lengths[key]] if key in heavy else infos[key] for key in keys]


def _stream(key: bytes, info: Facts, groups: list[Facts], size: Any, oldest: dict[Any, EntryId]) -> StreamSurvey:
    asked = b"entries-added" in info
    told = [
        group[b"entries-read"] + group[b"lag"]
        for group in groups
        if None not in (group[b"entries-read"], group[b"lag"])
    ]
    carried = [info.get(b"first-entry"), info.get(b"last-entry")]
    return StreamSurvey(
        to_name(key),
        info[b"length"],
        info[b"entries-added"] if asked else max(told, default=None),
        entry_id(info[b"last-generated-id"]) if asked else None,
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
        heavy=not asked or sum(len(word) for one in carried if one for word in one[1]) > HEAVY_BYTES,
    )


def _each(commands: Sequence[Args], keys: Sequence[bytes]) -> Conversation[list[Any]]:
    if not commands:
        return []
    replies: list[Any] = yield Batch(commands, keys=keys, repeatable=True)
    for reply in replies:
        if isinstance(reply, MillstreamError):
            raise reply  # a survey without a node's streams would tell that there are none
    return replies
