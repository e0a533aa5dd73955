"""Reading from streams: the options of XREAD and XREADGROUP, ranges of entries, and deliveries to consumers.

A delivery updates the pending lists and the group's position, and records the effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from millstream.engine.effects import claims
from millstream.engine.keyspace import STREAM
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_int
from millstream.engine.stream.group import Consumer, Group, advance_all
from millstream.engine.stream.ids import ID_MAX, format_id
from millstream.engine.stream.node import EntryReply, StreamNode
from millstream.engine.stream.stream import Stream
from millstream.wire import NIL_ARRAY, ErrorReply

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database
    from millstream.engine.session import Session
    from millstream.engine.stream.stream import Stream

MAX_ENTRIES_AFTER_BLOCK: Final = 1000
"""Limit on the entries of one reply to a blocked reader without COUNT, as in Redis: its id may be far back."""


@dataclass(slots=True)
class ReadOptions:
    """The options of XREAD and XREADGROUP."""

    streams: list[tuple[bytes, bytes]]
    """Keys, each with its unparsed id."""
    count: int = 0
    """0 means no limit."""
    block_ms: int | None = None
    """None: do not block; 0: block without timeout."""
    group: bytes | None = None
    consumer: bytes = b""
    no_ack: bool = False

    @classmethod
    def parse(cls, args: Sequence[bytes], name: str) -> ReadOptions:
        grouped = name == "xreadgroup"
        options = cls([])
        at, end = 1, len(args)
        while at < end:
            option, values_left = args[at].upper(), end - 1 - at
            if option == b"BLOCK" and values_left:
                at += 1
                options.block_ms = _timeout(args[at])
            elif option == b"COUNT" and values_left:
                at += 1
                options.count = max(parse_int(args[at]), 0)
            elif option == b"STREAMS" and values_left:
                options.streams = _pairs(args[at + 1 :])
                break
            elif option == b"GROUP" and values_left >= 2:
                if not grouped:
                    raise ErrorReply(_only_grouped("GROUP"))
                options.group, options.consumer = args[at + 1], args[at + 2]
                at += 2
            elif option == b"NOACK":
                if not grouped:
                    raise ErrorReply(_only_grouped("NOACK"))
                options.no_ack = True
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        if not options.streams:
            raise ErrorReply(SYNTAX_ERROR)
        if grouped and options.group is None:
            raise ErrorReply("ERR Missing GROUP option for XREADGROUP")
        return options


def _only_grouped(option: str) -> str:
    return f"ERR The {option} option is only supported by XREADGROUP. You called XREAD instead."


def _timeout(raw: bytes) -> int:
    timeout = parse_int(raw, "ERR timeout is not an integer or out of range")
    if timeout < 0:
        raise ErrorReply("ERR timeout is negative")
    return timeout


def _pairs(args: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    if len(args) % 2:
        raise ErrorReply("ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.")
    half = len(args) // 2
    return list(zip(args[:half], args[half:], strict=True))


Run = tuple[StreamNode, int, int]
"""A node, a start index and a stop index (not included)."""


def runs(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """Yields runs with the entries from ``first`` to ``last``, both included; at most ``count``, 0 means no limit."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.position(first)
    remaining = count or stream.length
    start = nodes[at].locate(first)
    while remaining:
        node = nodes[at]
        start = max(start, node.skip)
        stop = node.after(start, remaining)
        complete = last == ID_MAX or stop == start or node.id_at(stop - 1) <= last
        if not complete:
            stop = max(node.locate(last + 1), start)
        if stop > start:
            yield node, start, stop
            remaining -= _count_live(node, start, stop)
        at += 1
        if not complete or at == nodes.end:
            return
        start = 0


def runs_back(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """Like ``runs``, but from the end: the last run comes first."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.position(last)
    remaining = count or stream.length
    stop = nodes[at].total if last == ID_MAX else nodes[at].locate(last + 1)
    while remaining:
        node = nodes[at]
        start = node.before(stop, remaining) if stop > node.skip else stop
        complete = start == stop or node.id_at(start) >= first
        if not complete:
            start = node.locate(first)
        if stop > start:
            yield node, start, stop
            remaining -= _count_live(node, start, stop)
        at -= 1
        if not complete or at < nodes.first:
            return
        stop = nodes[at].total


def _count_live(node: StreamNode, start: int, stop: int) -> int:
    if node.dead is None:
        return stop - start
    return sum(index not in node.dead for index in range(start, stop))


def entries(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    replies: list[EntryReply] = []
    for node, start, stop in runs(stream, first, last, count):
        replies += node.entries(start, stop)
    return replies


def entries_back(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    """Like ``entries``, in descending order."""
    replies: list[EntryReply] = []
    for node, start, stop in runs_back(stream, first, last, count):
        replies += reversed(node.entries(start, stop))
    return replies


def entries_and_ids(stream: Stream, first: int, count: int) -> tuple[list[EntryReply], list[int]]:
    """The entries from ``first`` to the end, with their ids as ints for the pending list."""
    replies: list[EntryReply] = []
    ids: list[int] = []
    for node, start, stop in runs(stream, first, ID_MAX, count):
        replies += node.entries(start, stop)
        ids += node.ids(start, stop)
    return replies, ids


def entry_reply(stream: Stream, entry_id: int) -> EntryReply | None:
    """The entry with this id; None if it does not exist."""
    if not stream.length:
        return None
    node = stream.nodes[stream.nodes.position(entry_id)]
    index = node.find(entry_id)
    return None if index is None else node.entries(index, index + 1)[0]


def to_text(arg: bytes) -> str:
    """An argument in an error text, as C prints it: up to its first zero byte."""
    return arg.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def group_of(session: Session, key: bytes, name: bytes) -> tuple[Stream, Group]:
    """Returns the stream and the group; raises NOGROUP if one does not exist."""
    stream = session.db.read_as(key, Stream)
    group = None if stream is None else stream.groups.get(name)
    if stream is None or group is None:
        raise ErrorReply(f"NOGROUP No such key '{to_text(key)}' or consumer group '{to_text(name)}'")
    return stream, group


def consumer_of(db: Database, key: bytes, group: Group, name: bytes) -> Consumer:
    """Returns the consumer, created if necessary, and updates its seen-time."""
    engine = db.engine
    consumer = group.consumers.get(name)
    if consumer is None:
        consumer = group.consumers[name] = Consumer(name, engine.now_ms)
        engine.dirty += 1
        engine.notify(db, STREAM, b"xgroup-createconsumer", key)
        if engine.recording:
            engine.record(db, b"XGROUP", b"CREATECONSUMER", key, group.name, name)
    else:
        consumer.seen_ms = engine.now_ms
    return consumer


def modified_without_wake(db: Database, key: bytes, changes: int = 1) -> None:
    """Marks the stream as changed for sessions that watch it, but does not serve blocked readers.

    As in Redis, only XADD wakes readers.
    """
    for session in db.watchers.get(key, ()):
        session.dirty = True
    modified_without_watch(db, key, changes)


def modified_without_watch(db: Database, key: bytes, changes: int = 1) -> None:
    """Counts changes of a group or a counter, and updates the memory account. As in Redis, WATCH ignores them."""
    engine = db.engine
    engine.dirty += changes
    if engine.memory.limit:
        engine.memory.note_change(db.index, key)


class GroupDelivery(NamedTuple):
    """Delivers entries of one stream to a consumer of one group, during one command."""

    db: Database
    key: bytes
    stream: Stream
    group: Group

    @property
    def has_new(self) -> bool:
        return self.stream.length > 0 and self.stream.top_id > self.group.last_id

    def new(self, consumer: Consumer, count: int, *, no_ack: bool) -> list[EntryReply]:
        """Delivers entries that were not yet delivered to the group."""
        db, key, stream, group = self
        engine = db.engine
        entries, ids = entries_and_ids(stream, group.last_id + 1, count)
        modified_without_watch(db, key)
        if not ids:
            return entries
        advance_all(stream, group, ids)
        if not no_ack:
            group.deliver(ids, consumer, engine.now_ms)
            if engine.recording:
                info = (consumer, engine.now_ms, 1)
                for args in claims(key, group.name, ids, info):
                    engine.record(db, *args)
        if engine.recording:
            record_position(db, key, group)
        return entries

    def history(self, consumer: Consumer, after: int, count: int) -> list[EntryReply]:
        """Returns the consumer's pending entries after ``after``.

        Increments the delivery count of each existing entry. A deleted entry is returned as an id without fields.
        """
        db, key, stream, group = self
        engine = db.engine
        modified_without_watch(db, key)
        replies: list[EntryReply] = []
        for entry_id, (_, _, deliveries) in consumer.pending.page(after + 1, count or len(consumer.pending)):
            reply = entry_reply(stream, entry_id)
            if reply is None:
                replies.append([format_id(entry_id), NIL_ARRAY])
                continue
            replies.append(reply)
            info = (consumer, engine.now_ms, min(deliveries + 1, INT64_MAX))
            group.assign(entry_id, info)
            if engine.recording:
                for args in claims(key, group.name, [entry_id], info):
                    engine.record(db, *args)
        return replies


def record_position(db: Database, key: bytes, group: Group) -> None:
    reads = b"%d" % group.entries_read
    db.engine.record(db, b"XGROUP", b"SETID", key, group.name, format_id(group.last_id), b"ENTRIESREAD", reads)
