"""How commands come to a stream, a group and a consumer, and what they say when there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.engine.pubsub import STREAM
from millstream.engine.stream.group import Consumer, Group
from millstream.engine.stream.stream import Stream
from millstream.wire import ErrorReply

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
