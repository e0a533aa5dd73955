"""Handing a group's entries to a consumer, with all that is to be remembered and recorded of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.engine.stream import reading
from millstream.engine.stream.effects import claims
from millstream.engine.stream.group import Consumer, Group, advance_all
from millstream.engine.stream.ids import format_id
from millstream.engine.stream.lookup import changed_unwatched
from millstream.engine.stream.node import EntryReply
from millstream.engine.stream.stream import Stream
from millstream.wire import NIL_ARRAY

if TYPE_CHECKING:
    from millstream.engine.keyspace import Database


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
