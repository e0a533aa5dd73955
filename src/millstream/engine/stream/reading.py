"""Reading: the words of XREAD and XREADGROUP, runs of entries, forwards and backwards, from node to node; and how
commands find a group and a consumer, and hand entries over.

What is to be remembered and recorded of a delivery is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from millstream.engine.effects import claims
from millstream.engine.keyspace import STREAM
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.stream.group import Consumer, Group, advance_all
from millstream.engine.stream.ids import ID_MAX, format_id
from millstream.engine.stream.node import EntryReply, StreamNode
from millstream.engine.stream.stream import Stream
from millstream.wire import NIL_ARRAY, ErrorReply

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database
    from millstream.engine.session import Session
    from millstream.engine.stream.stream import Stream

BLOCKED_COUNT: Final = 1000
"""What a reader that has waited gets at most where it set no COUNT, as in Redis: its id may lie far back."""


@dataclass(slots=True)
class ReadOptions:
    streams: list[tuple[bytes, bytes]]
    """Keys, each with the id as it was written."""
    count: int = 0
    """0 is all."""
    block_ms: int | None = None
    """None: do not wait; 0: for ever."""
    group: bytes | None = None
    consumer: bytes = b""
    no_ack: bool = False

    @classmethod
    def parse(cls, args: Sequence[bytes], name: str) -> ReadOptions:
        grouped = name == "xreadgroup"
        options = cls([])
        at, end = 1, len(args)
        while at < end:
            option, more = args[at].upper(), end - 1 - at
            if option == b"BLOCK" and more:
                at += 1
                options.block_ms = _timeout(args[at])
            elif option == b"COUNT" and more:
                at += 1
                options.count = max(parse_int(args[at]), 0)
            elif option == b"STREAMS" and more:
                options.streams = _pairs(args[at + 1 :])
                break
            elif option == b"GROUP" and more >= 2:
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


def _pairs(words: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    if len(words) % 2:
        raise ErrorReply("ERR Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.")
    half = len(words) // 2
    return list(zip(words[:half], words[half:], strict=True))


Run = tuple[StreamNode, int, int]
"""Part of a node, from an index up to another one."""


def runs(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """The entries from ``first`` to ``last``, both included; at most ``count`` of them, 0 meaning all."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.place(first)
    left = count or stream.length
    start = nodes[at].locate(first)
    while left:
        node = nodes[at]
        start = max(start, node.skip)
        stop = node.after(start, left)
        whole = last == ID_MAX or stop == start or node.id_at(stop - 1) <= last
        if not whole:
            stop = max(node.locate(last + 1), start)
        if stop > start:
            yield node, start, stop
            left -= _live(node, start, stop)
        at += 1
        if not whole or at == nodes.end:
            return
        start = 0


def runs_back(stream: Stream, first: int, last: int, count: int) -> Iterator[Run]:
    """As ``runs``, from the end: the last run comes first."""
    nodes = stream.nodes
    if first > last or not stream.length:
        return
    at = nodes.place(last)
    left = count or stream.length
    stop = nodes[at].total if last == ID_MAX else nodes[at].locate(last + 1)
    while left:
        node = nodes[at]
        start = node.before(stop, left) if stop > node.skip else stop
        whole = start == stop or node.id_at(start) >= first
        if not whole:
            start = node.locate(first)
        if stop > start:
            yield node, start, stop
            left -= _live(node, start, stop)
        at -= 1
        if not whole or at < nodes.first:
            return
        stop = nodes[at].total


def _live(node: StreamNode, start: int, stop: int) -> int:
    if node.dead is None:
        return stop - start
    return sum(index not in node.dead for index in range(start, stop))


def entries(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    found: list[EntryReply] = []
    for node, start, stop in runs(stream, first, last, count):
        found += node.entries(start, stop)
    return found


def entries_back(stream: Stream, first: int, last: int, count: int = 0) -> list[EntryReply]:
    """The greatest id first."""
    found: list[EntryReply] = []
    for node, start, stop in runs_back(stream, first, last, count):
        found += reversed(node.entries(start, stop))
    return found


def entries_and_ids(stream: Stream, first: int, count: int) -> tuple[list[EntryReply], list[int]]:
    """From ``first`` to the end, with the ids as numbers for the pending list."""
    found: list[EntryReply] = []
    ids: list[int] = []
    for node, start, stop in runs(stream, first, ID_MAX, count):
        found += node.entries(start, stop)
        ids += node.ids(start, stop)
    return found, ids


def entry(stream: Stream, entry_id: int) -> EntryReply | None:
    """This very entry; None if it is not there."""
    if not stream.length:
        return None
    node = stream.nodes[stream.nodes.place(entry_id)]
    index = node.find(entry_id)
    return None if index is None else node.entries(index, index + 1)[0]


def shown(word: bytes) -> str:
    """A word inside an error, as C prints it: up to its first zero byte."""
    return word.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def group_of(session: Session, key: bytes, name: bytes) -> tuple[Stream, Group]:
    """A group that must be there."""
    stream = session.db.read_as(key, Stream)
    group = None if stream is None else stream.groups.get(name)
    if stream is None or group is None:
        raise ErrorReply(f"NOGROUP No such key '{shown(key)}' or consumer group '{shown(name)}'")
    return stream, group


def consumer_of(db: Database, key: bytes, group: Group, name: bytes) -> Consumer:
    """The consumer, made if need be; it has been seen now."""
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


def modified_quietly(db: Database, key: bytes, changes: int = 1) -> None:
    """The stream's value changed, but not in a way that somebody could wait for: who watches the key is told, who waits
    for it goes on waiting, as in Redis, where XADD alone wakes readers."""
    for session in db.watchers.get(key, ()):
        session.dirty = True
    changed_unwatched(db, key, changes)


def changed_unwatched(db: Database, key: bytes, changes: int = 1) -> None:
    """A group changed, or a counter: who watches the key is not told, as in Redis. The account of memory is."""
    engine = db.engine
    engine.dirty += changes
    if engine.memory.limit:
        engine.memory.note_change(db.index, key)


class GroupDelivery(NamedTuple):
    """One stream and one group of it, while a command reads from them."""

    db: Database
    key: bytes
    stream: Stream
    group: Group

    @property
    def has_new(self) -> bool:
        return self.stream.length > 0 and self.stream.top_id > self.group.last_id

    def new(self, consumer: Consumer, count: int, *, no_ack: bool) -> list[EntryReply]:
        """What nobody in the group was given yet."""
        db, key, stream, group = self
        engine = db.engine
        entries, ids = entries_and_ids(stream, group.last_id + 1, count)
        changed_unwatched(db, key)
        if not ids:
            return entries
        advance_all(stream, group, ids)
        if not no_ack:
            group.deliver(ids, consumer, engine.now_ms)
            if engine.recording:
                holding = (consumer, engine.now_ms, 1)
                for words in claims(key, group.name, ids, holding):
                    engine.record(db, *words)
        if engine.recording:
            record_position(db, key, group)
        return entries

    def history(self, consumer: Consumer, after: int, count: int) -> list[EntryReply]:
        """What the consumer holds already. An entry that is there counts as delivered once more; one that is gone is
        shown by its id alone."""
        db, key, stream, group = self
        engine = db.engine
        changed_unwatched(db, key)
        found: list[EntryReply] = []
        for entry_id, (_, _, deliveries) in consumer.pending.page(after + 1, count or len(consumer.pending)):
            still_there = entry(stream, entry_id)
            if still_there is None:
                found.append([format_id(entry_id), NIL_ARRAY])
                continue
            found.append(still_there)
            holding = (consumer, engine.now_ms, deliveries + 1)
            group.hold(entry_id, holding)
            if engine.recording:
                for words in claims(key, group.name, [entry_id], holding):
                    engine.record(db, *words)
        return found


def record_position(db: Database, key: bytes, group: Group) -> None:
    reads = b"%d" % group.entries_read
    db.engine.record(db, b"XGROUP", b"SETID", key, group.name, format_id(group.last_id), b"ENTRIESREAD", reads)
