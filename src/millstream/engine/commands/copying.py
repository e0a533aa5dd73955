"""A key's value somewhere else: COPY within the server, DUMP and RESTORE of streams between servers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from millstream.engine.keyspace import Database
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.pubsub import GENERIC
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.snapshot import effects_of_key
from millstream.engine.stream import Stream
from millstream.engine.stream.dump import dump, duplicate, is_sound, restore
from millstream.engine.stream.listpack import BadPayload
from millstream.wire import OK, ErrorReply, Reply

STREAMS_ONLY = "ERR millstream dumps streams only. Use COPY here, or read the value and write it there."


@command("COPY", arity=-3, flags=Flag.WRITE | Flag.DENY_OOM, keys=(1, 2, 1))
def copy(session: Session, args: Sequence[bytes]) -> Reply:
    db, (source, target) = session.db, args[1:3]
    to, replace = _copy_options(session, args[3:])
    if to is db and source == target:
        raise ErrorReply("ERR source and destination objects are the same")
    value = db.read(source)
    if value is None:
        return 0
    if to.find(target) is not None:
        if not replace:
            return 0
        to.remove(target)
        session.engine.record(to, b"DEL", target)
    to.add(target, duplicate(value, session.engine.config) if type(value) is Stream else deepcopy(value))
    if source in db.expires:
        to.expire_at(target, db.expires[source])
    _made(to, target, b"copy_to")
    return 1


def _copy_options(session: Session, words: Sequence[bytes]) -> tuple[Database, bool]:
    to, replace = session.db, False
    at = 0
    while at < len(words):
        option = words[at].upper()
        if option == b"REPLACE":
            replace = True
        elif option == b"DB" and at + 1 < len(words):
            at += 1
            index = parse_int(words[at])
            if not 0 <= index < len(session.engine.databases):
                raise ErrorReply("ERR DB index is out of range")
            to = session.engine.databases[index]
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    return to, replace


def _made(db: Database, key: bytes, event: bytes) -> None:
    """A whole value came into being: told, and recorded as what makes it."""
    engine = db.engine
    engine.modified(db, key)
    engine.notify(db, GENERIC, event, key)
    if engine.recording:
        for words in effects_of_key(db, key):
            engine.record(db, *words)


@command("DUMP", arity=2, flags=Flag.READONLY, keys=(1, 1, 1))
def dump_(session: Session, args: Sequence[bytes]) -> Reply:
    value: Any = session.db.read(args[1])
    if value is not None and type(value) is not Stream:
        raise ErrorReply(STREAMS_ONLY)
    return None if value is None else dump(value)


@command("RESTORE", arity=-4, flags=Flag.WRITE | Flag.DENY_OOM, keys=(1, 1, 1))
@command("RESTORE-ASKING", arity=-4, flags=Flag.WRITE | Flag.DENY_OOM, keys=(1, 1, 1))
def restore_(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key, payload = session.engine, session.db, args[1], args[3]
    replace, absolute = _restore_options(args[4:])
    there = db.find(key) is not None
    if there and not replace:
        raise ErrorReply("BUSYKEY Target key name already exists.")
    ttl = parse_int(args[2])
    if ttl < 0:
        raise ErrorReply("ERR Invalid TTL value, must be >= 0")
    stream = _stream_of(session, payload)
    if there:
        db.remove(key)
        engine.record(db, b"DEL", key)
    at_ms = ttl if absolute else engine.now_ms + ttl
    if ttl and at_ms <= engine.now_ms:
        if there:
            engine.modified(db, key)
            engine.notify(db, GENERIC, b"del", key)
        return OK
    db.add(key, stream)
    if ttl:
        db.expire_at(key, at_ms)
    _made(db, key, b"restore")
    return OK


def _stream_of(session: Session, payload: bytes) -> Stream:
    if not is_sound(payload):
        raise ErrorReply("ERR DUMP payload version or checksum are wrong")
    try:
        return restore(payload, session.engine.config)
    except BadPayload as error:
        raise ErrorReply("ERR Bad data format") from error


def _restore_options(words: Sequence[bytes]) -> tuple[bool, bool]:
    """Whether what is there is replaced, and whether the time to live is a moment. How idle it is, nobody asks us."""
    replace = absolute = False
    seen: set[bytes] = set()
    at = 0
    while at < len(words):
        option = words[at].upper()
        if option == b"REPLACE":
            replace = True
        elif option == b"ABSTTL":
            absolute = True
        elif option in (b"IDLETIME", b"FREQ") and at + 1 < len(words) and not seen - {option}:
            seen.add(option)
            at += 1
            number = parse_int(words[at])
            if option == b"IDLETIME" and number < 0:
                raise ErrorReply("ERR Invalid IDLETIME value, must be >= 0")
            if option == b"FREQ" and not 0 <= number <= 255:
                raise ErrorReply("ERR Invalid FREQ value, must be >= 0 and <= 255")
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    return replace, absolute
