"""Groups as commands meet them: how they find a group and a consumer, and hand entries over.

What is to be remembered and recorded of a delivery is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.engine.effects import claims
from millstream.engine.keyspace import STREAM
from millstream.engine.stream import reading
from millstream.engine.stream.group import Consumer, Group, advance_all
from millstream.engine.stream.ids import format_id
from millstream.engine.stream.node import EntryReply
from millstream.engine.stream.stream import Stream
from millstream.wire import NIL_ARRAY, ErrorReply

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database
    from millstream.engine.session import Session


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
        engine.memory.touch(db.index, key)


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
        entries, ids = reading.entries_and_ids(stream, group.last_id + 1, count)
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
            entry = reading.entry(stream, entry_id)
            if entry is None:
                found.append([format_id(entry_id), NIL_ARRAY])
                continue
            found.append(entry)
            holding = (consumer, engine.now_ms, deliveries + 1)
            group.hold(entry_id, holding)
            if engine.recording:
                for words in claims(key, group.name, [entry_id], holding):
                    engine.record(db, *words)
        return found


def record_position(db: Database, key: bytes, group: Group) -> None:
    reads = b"%d" % group.entries_read
    db.engine.record(db, b"XGROUP", b"SETID", key, group.name, format_id(group.last_id), b"ENTRIESREAD", reads)
