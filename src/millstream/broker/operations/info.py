"""Information about streams, groups and the server. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.broker.context import Context
from millstream.broker.operations.conversion import Name, entries, entry_id, mapping, name_arg, sequence
from millstream.broker.transport.targets import NodeName
from millstream.errors import MillstreamError, ServerTooOld
from millstream.model import ConsumerInfo, Entry, EntryId, GroupInfo, StreamInfo
from millstream.wire import Args, Batch, Command, ErrorReply, Operation, to_name

SCAN_COUNT = b"1000"


class InfoFields(dict[bytes, Any]):
    """A reply of XINFO as a dict. Raises ServerTooOld for a missing field."""

    def __missing__(self, name: bytes) -> Any:
        raise ServerTooOld(name.decode())


def _entry_or_none(item: Any) -> Entry | None:
    return entries([item])[0] if item else None


def stream_info(context: Context, stream: Name) -> Operation[StreamInfo]:
    key = name_arg(stream, "stream")
    fields = InfoFields(mapping((yield Command((b"XINFO", b"STREAM", key), key, repeatable=True))))
    return StreamInfo(
        name=to_name(key),
        length=fields[b"length"],
        last_generated=entry_id(fields[b"last-generated-id"]),
        entries_added=fields[b"entries-added"],
        max_deleted=entry_id(fields[b"max-deleted-entry-id"]),
        recorded_first=entry_id(fields[b"recorded-first-entry-id"]),
        groups=fields[b"groups"],
        first=_entry_or_none(fields[b"first-entry"]),
        last=_entry_or_none(fields[b"last-entry"]),
    )


def group_info(context: Context, stream: Name) -> Operation[list[GroupInfo]]:
    key = name_arg(stream, "stream")
    reply = yield Command((b"XINFO", b"GROUPS", key), key, repeatable=True)
    groups = [InfoFields(mapping(flat)) for flat in reply]
    if not groups:
        return []
    members = yield Batch([(b"XINFO", b"CONSUMERS", key, fields[b"name"]) for fields in groups], key, repeatable=True)
    return [
        GroupInfo(
            name=to_name(fields[b"name"]),
            pending=fields[b"pending"],
            last_delivered=entry_id(fields[b"last-delivered-id"]),
            entries_read=fields[b"entries-read"],
            lag=fields[b"lag"],
            consumers=[_consumer(mapping(flat)) for flat in consumers],
        )
        for fields, consumers in zip(groups, members, strict=True)
        if not isinstance(consumers, ErrorReply)
    ]


def consumer_info(context: Context, stream: Name, group: Name) -> Operation[list[ConsumerInfo]]:
    key = name_arg(stream, "stream")
    reply = yield Command((b"XINFO", b"CONSUMERS", key, name_arg(group, "group")), key, repeatable=True)
    return [_consumer(mapping(flat)) for flat in reply]


def _consumer(fields: dict[bytes, Any]) -> ConsumerInfo:
    return ConsumerInfo(
        name=to_name(fields[b"name"]),
        pending=fields[b"pending"],
        idle_ms=fields[b"idle"],
        inactive_ms=fields.get(b"inactive"),
    )


def list_streams(context: Context, pattern: str = "*") -> Operation[list[str]]:
    """The sorted names of the streams that match the glob.

    Redis accepts the empty key. It is left out, because every other operation rejects an empty name: a single XADD with
    a wrong key must not make all streams unreadable for the callers that list them.
    """
    return [name for name in (yield from _scan(context, pattern, b"TYPE", b"stream")) if name]


def list_keys(context: Context, pattern: str) -> Operation[list[str]]:
    """The sorted names of all keys of any type that match the glob."""
    return (yield from _scan(context, pattern))


def _scan(context: Context, pattern: str, *options: bytes) -> Operation[list[str]]:
    glob = name_arg(pattern, "pattern")
    nodes: list[bytes | None] = [None]
    if context.cluster:
        slots = yield Command((b"CLUSTER", b"SLOTS"), repeatable=True)
        nodes = [*{NodeName(b"%s:%d" % (primary[0], primary[1])) for _, _, primary, *_ in slots}]
    keys: set[bytes] = set()
    for node in nodes:
        cursor = b"0"
        while True:
            args = (b"SCAN", cursor, b"MATCH", glob, b"COUNT", SCAN_COUNT, *options)
            cursor, names = yield Command(args, node, repeatable=True)
            keys.update(names)
            if cursor == b"0":
                break
    return sorted(map(to_name, keys))


def ping(context: Context) -> Operation[None]:
    yield Command((b"PING",), repeatable=True)


def server_time_ms(context: Context) -> Operation[int]:
    seconds, micros = yield Command((b"TIME",), repeatable=True)
    return int(seconds) * 1000 + int(micros) // 1000


def server_info(context: Context, section: str = "default") -> Operation[dict[str, str]]:
    reply: bytes = yield Command((b"INFO", name_arg(section, "section")), repeatable=True)
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if line and line[0] != "#")
    return {name: value for name, _, value in lines}


def server_version(context: Context) -> Operation[tuple[int, ...]]:
    """The server's version, such as (7, 0, 15)."""
    fields = yield from server_info(context, "server")
    return tuple(int(part) for part in fields["redis_version"].split(".") if part.isdigit())


def known_commands(context: Context, names: Sequence[str]) -> Operation[list[str]]:
    """Those of the commands that the server has, by COMMAND INFO. Raises PermissionDenied."""
    reply = yield Command((b"COMMAND", b"INFO", *(name_arg(name, "names") for name in names)), repeatable=True)
    return [name for name, description in zip(names, reply, strict=True) if description]


def server_setting(context: Context, name: str) -> Operation[str | None]:
    """The value of one setting (CONFIG GET); None if the server does not know it. Raises PermissionDenied."""
    reply = yield Command((b"CONFIG", b"GET", name_arg(name, "name")), repeatable=True)
    return to_name(reply[1]) if reply else None


class ClientStatus(NamedTuple):
    """One connection to a server: its last command in lower case, and whether it is blocked in it."""

    command: str
    blocked: bool


def connected_clients(context: Context, stream: Name) -> Operation[list[ClientStatus]]:
    """The clients that are connected to the stream's server. Raises PermissionDenied."""
    key = name_arg(stream, "stream")
    reply: bytes = yield Command((b"CLIENT", b"LIST", b"TYPE", b"NORMAL"), key, repeatable=True)
    clients = [dict(arg.split("=", 1) for arg in line.split() if "=" in arg) for line in to_name(reply).splitlines()]
    statuses = [ClientStatus(client.get("cmd", "").lower(), "b" in client.get("flags", "")) for client in clients]
    # Without this connection. Redis 7.0 and later also report the subcommand.
    return [client for client in statuses if client.command not in ("client", "client|list")]


# --- statistics of many streams, in a few round trips for any number of streams ---


class GroupStats(NamedTuple):
    """Statistics of a group. ``oldest_pending`` is the smallest pending id."""

    name: str
    consumers: int
    pending: int
    last_delivered: EntryId
    lag: int | None
    oldest_pending: EntryId | None


class StreamStats(NamedTuple):
    """Statistics of a stream.

    ``heavy``: the first or last entry, which XINFO STREAM returns, is too large for frequent reads, so XINFO STREAM is
    not sent. Then ``last_generated`` is None, and ``entries_added`` is derived from a group, or None.

    ``has_announcements``: the first or the last entry announces a data stream, as in a load-balancer stream.
    """

    name: str
    length: int
    entries_added: int | None
    last_generated: EntryId | None
    memory_bytes: int | None
    groups: list[GroupStats]
    heavy: bool = False
    has_announcements: bool = False

    def assigns_streams(self, group: str) -> bool:
        """Whether this is a load-balancer stream and ``group`` is the group of its members.

        A pending entry of that group is a data stream that a member owns, so its age is no sign of a stuck message.
        """
        service = self.name.removesuffix(LOAD_BALANCER_SUFFIX)
        return self.has_announcements and service != self.name and group == f"{service}-group"


LOAD_BALANCER_SUFFIX = "-input"
ANNOUNCEMENT_FIELD = b"lbs-input"
"""The field of every entry of a load-balancer stream (``millstream.assignment``)."""
HEAVY_BYTES = 1 << 20
"""The memory of a stream, or of two entries, from which on XINFO STREAM is considered expensive."""
HEAVY_ENTRY_BYTES = 64 << 10
"""The average size of an entry of a heavy stream: a long stream of small entries is large, but not heavy."""


def read_stream_stats(
    context: Context,
    streams: Sequence[Name],
    *,
    memory: bool = True,
    before: Mapping[str, StreamStats] | None = None,
) -> Operation[list[StreamStats]]:
    """Length, memory and groups of each stream that exists. Reads only; not a consistent snapshot.

    With ``before``, an earlier result, and without ``memory``, memory usage is copied from it and read only for new
    streams.
    """
    keys = [name_arg(stream, "streams") for stream in sequence(streams, "streams", "streams")]
    previous = before or {}
    sizes = {key: previous[name].memory_bytes for key in keys if (name := to_name(key)) in previous}
    unmeasured = keys if memory else [key for key in keys if key not in sizes] if before is not None else []
    usage = yield from _reply_per_key([(b"MEMORY", b"USAGE", key) for key in unmeasured], unmeasured)
    sizes |= zip(unmeasured, usage, strict=True)
    infos = yield from _infos(keys, sizes, {} if memory else previous)
    groups = yield from _reply_per_key([(b"XINFO", b"GROUPS", key) for key in keys], keys)
    existing = [
        (key, InfoFields(mapping(info)), [InfoFields(mapping(group)) for group in reply], sizes.get(key))
        for key, info, reply in zip(keys, infos, groups, strict=True)
        if not isinstance(info, ErrorReply) and not isinstance(reply, ErrorReply)
    ]
    with_pending = [(key, group[b"name"]) for key, _, members, _ in existing for group in members if group[b"pending"]]
    summaries = yield from _reply_per_key(
        [(b"XPENDING", *pair) for pair in with_pending], [key for key, _ in with_pending]
    )
    oldest = {
        pair: entry_id(summary[1])
        for pair, summary in zip(with_pending, summaries, strict=True)
        if not isinstance(summary, ErrorReply) and summary[1]
    }
    return [_stream_stats(key, info, members, size, oldest) for key, info, members, size in existing]


def _infos(keys: list[bytes], sizes: Mapping[bytes, Any], previous: Mapping[str, StreamStats]) -> Operation[list[Any]]:
    """XINFO STREAM of each key; of a heavy stream only its length.

    Memory usage shows that a stream of large entries is heavy before an entry is fetched. A few large entries in a long
    stream are noticed once they were fetched; they are not fetched again until memory is read the next time.
    """
    large = [key for key in keys if isinstance(size := sizes.get(key), int) and size > HEAVY_BYTES]
    lengths = dict(zip(large, (yield from _reply_per_key([(b"XLEN", key) for key in large], large)), strict=True))
    heavy = {
        key
        for key, length in lengths.items()
        if isinstance(length, int)
        and length
        and (
            sizes[key] > length * HEAVY_ENTRY_BYTES
            or ((earlier := previous.get(to_name(key))) is not None and earlier.heavy)
        )
    }
    light = [key for key in keys if key not in heavy]
    infos = dict(
        zip(light, (yield from _reply_per_key([(b"XINFO", b"STREAM", key) for key in light], light)), strict=True)
    )
    return [[b"length", lengths[key]] if key in heavy else infos[key] for key in keys]


def _stream_stats(
    key: bytes, info: InfoFields, groups: list[InfoFields], size: Any, oldest: dict[Any, EntryId]
) -> StreamStats:
    has_info = b"entries-added" in info
    added = [
        group[b"entries-read"] + group[b"lag"]
        for group in groups
        if None not in (group[b"entries-read"], group[b"lag"])
    ]
    ends = [entry for entry in (info.get(b"first-entry"), info.get(b"last-entry")) if entry]
    return StreamStats(
        to_name(key),
        info[b"length"],
        info[b"entries-added"] if has_info else max(added, default=None),
        entry_id(info[b"last-generated-id"]) if has_info else None,
        size if isinstance(size, int) else None,
        [
            GroupStats(
                to_name(group[b"name"]),
                group[b"consumers"],
                group[b"pending"],
                entry_id(group[b"last-delivered-id"]),
                group[b"lag"],
                oldest.get((key, group[b"name"])),
            )
            for group in groups
        ],
        heavy=not has_info or sum(len(part) for entry in ends for part in entry[1]) > HEAVY_BYTES,
        has_announcements=any(ANNOUNCEMENT_FIELD in entry[1][::2] for entry in ends),
    )


def _reply_per_key(commands: Sequence[Args], keys: Sequence[bytes]) -> Operation[list[Any]]:
    """Sends one command per key and returns the replies. Raises if a node did not answer."""
    if not commands:
        return []
    replies: list[Any] = yield Batch(commands, keys=keys, repeatable=True)
    for reply in replies:
        if isinstance(reply, MillstreamError):
            raise reply  # without the streams of a node, the result would look as if they did not exist
    return replies
