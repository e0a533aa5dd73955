"""Commands on keys of any type: existence, time to live, copies (COPY, DUMP, RESTORE, RENAME), deletion."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from millstream.engine.effects import effects_of_key
from millstream.engine.expiry import ExpireCondition, parse_expiry_ms
from millstream.engine.glob import glob
from millstream.engine.keyspace import GENERIC, Database, ScanOptions, encoding_of, parse_cursor, type_of
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.stream import Stream
from millstream.engine.stream.dump import dump, duplicate, is_valid, restore
from millstream.engine.stream.listpack import BadPayload
from millstream.wire import OK, ErrorReply, Reply, Status

_READ = Flag.READONLY | Flag.FAST
_WRITE = Flag.WRITE | Flag.FAST


@command("DEL", arity=-2, flags=Flag.WRITE, keys=(1, -1, 1))
@command("UNLINK", arity=-2, flags=_WRITE, keys=(1, -1, 1))
def delete(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db = session.engine, session.db
    deleted: list[bytes] = []
    for key in args[1:]:
        if db.find(key) is not None:
            engine.delete(db, key)
            deleted.append(key)
    if deleted:
        engine.record(db, b"DEL", *deleted)
    return len(deleted)


@command("EXISTS", arity=-2, flags=_READ, keys=(1, -1, 1))
@command("TOUCH", arity=-2, flags=_READ, keys=(1, -1, 1))
def exists(session: Session, args: Sequence[bytes]) -> Reply:
    return sum(session.db.read(key) is not None for key in args[1:])


@command("TYPE", arity=2, flags=_READ, keys=(1, 1, 1))
def type_(session: Session, args: Sequence[bytes]) -> Reply:
    return Status(type_of(session.db.read(args[1])))


@command("KEYS", arity=2, flags=Flag.READONLY)
def keys(session: Session, args: Sequence[bytes]) -> Reply:
    db, fits = session.db, glob(args[1]).matches
    return [key for key in db.values if fits(key) and not _is_over(db, key)]


@command("SCAN", arity=-2, flags=Flag.READONLY)
def scan(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db = session.engine, session.db
    cursor = parse_cursor(args[1])
    options = ScanOptions(args[2:], with_type=True)
    next_cursor, names = engine.scan_orders.page((db.index, None), db.values, cursor, options.count)
    matching = [
        key
        for key in names
        if options.matches(key)
        and (value := db.find(key)) is not None
        and (options.kind is None or type_of(value) == options.kind)
    ]
    return [b"%d" % next_cursor, matching]


@command("RANDOMKEY", arity=1, flags=Flag.READONLY)
def randomkey(session: Session, args: Sequence[bytes]) -> Reply:
    db = session.db
    names = list(db.values)
    while names:
        key = names.pop(session.engine.random.randrange(len(names)))
        if db.find(key) is not None:
            return key
    return None


@command("RENAME", arity=3, flags=Flag.WRITE, keys=(1, 2, 1))
def rename(session: Session, args: Sequence[bytes]) -> Reply:
    if session.db.find(args[1]) is None:
        raise ErrorReply("ERR no such key")
    if args[1] != args[2]:
        _move(session, args)
    return OK


@command("RENAMENX", arity=3, flags=_WRITE, keys=(1, 2, 1))
def renamenx(session: Session, args: Sequence[bytes]) -> Reply:
    if session.db.find(args[1]) is None:
        raise ErrorReply("ERR no such key")
    if session.db.find(args[2]) is not None:
        return 0
    _move(session, args)
    return 1


def _move(session: Session, args: Sequence[bytes]) -> None:
    """Renames a key, with its time to live. An existing key with the new name is replaced without a notification."""
    engine, db, old, new = session.engine, session.db, args[1], args[2]
    at_ms = db.expires.get(old)
    value = db.values[old]
    db.remove(new)
    db.add(new, value)
    if at_ms is not None:
        db.expire_at(new, at_ms)
    db.remove(old)
    engine.modified(db, old)
    engine.modified(db, new)
    engine.notify(db, GENERIC, b"rename_from", old)
    engine.notify(db, GENERIC, b"rename_to", new)
    engine.record(db, b"RENAME", old, new)


@command("OBJECT|ENCODING", arity=3, flags=Flag.READONLY, keys=(2, 2, 1))
def object_encoding(session: Session, args: Sequence[bytes]) -> Reply:
    value = session.db.find(args[2])
    return None if value is None else encoding_of(value)


@command("DBSIZE", arity=1, flags=_READ)
def dbsize(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.db.values)


@command("FLUSHDB", arity=-1, flags=Flag.WRITE)
def flushdb(session: Session, args: Sequence[bytes]) -> Reply:
    _check_flush(args)
    session.engine.flush(session.db)
    session.engine.record(session.db, b"FLUSHDB")
    return OK


@command("FLUSHALL", arity=-1, flags=Flag.WRITE)
def flushall(session: Session, args: Sequence[bytes]) -> Reply:
    _check_flush(args)
    for db in session.engine.databases:
        session.engine.flush(db)
    session.engine.record(session.db, b"FLUSHALL")
    return OK


def _check_flush(args: Sequence[bytes]) -> None:
    if len(args) > 2 or (len(args) == 2 and args[1].upper() not in (b"SYNC", b"ASYNC")):
        raise ErrorReply("ERR syntax error")


def _is_over(db: Database, key: bytes) -> bool:
    """Whether the key has expired. It is not removed here, because KEYS iterates over the dict."""
    at_ms = db.expires.get(key)
    return at_ms is not None and at_ms < db.engine.now_ms


def _expire(name: str, *, seconds: bool, relative: bool) -> None:
    def handler(session: Session, args: Sequence[bytes]) -> Reply:
        engine, db, key = session.engine, session.db, args[1]
        condition = ExpireCondition(args[3:])
        at_ms = parse_expiry_ms(args[2], engine.now_ms, seconds=seconds, relative=relative, command_name=name.lower())
        if db.find(key) is None or not condition.allows(db.expires.get(key), at_ms):
            return 0
        if at_ms <= engine.now_ms and not engine.loading:
            engine.delete(db, key)
            engine.record(db, b"DEL", key)
            return 1
        db.expire_at(key, at_ms)
        engine.modified(db, key)
        engine.notify(db, GENERIC, b"expire", key)
        engine.record(db, b"PEXPIREAT", key, b"%d" % at_ms)
        return 1

    command(name, arity=-3, flags=_WRITE, keys=(1, 1, 1))(handler)


_expire("EXPIRE", seconds=True, relative=True)
_expire("PEXPIRE", seconds=False, relative=True)
_expire("EXPIREAT", seconds=True, relative=False)
_expire("PEXPIREAT", seconds=False, relative=False)


def _ttl(name: str, *, seconds: bool, relative: bool) -> None:
    def handler(session: Session, args: Sequence[bytes]) -> Reply:
        db, key = session.db, args[1]
        if db.read(key) is None:
            return -2
        at_ms = db.expires.get(key)
        if at_ms is None:
            return -1
        ms = max(at_ms - db.engine.now_ms, 0) if relative else at_ms
        return (ms + 500) // 1000 if seconds else ms

    command(name, arity=2, flags=_READ, keys=(1, 1, 1))(handler)


_ttl("TTL", seconds=True, relative=True)
_ttl("PTTL", seconds=False, relative=True)
_ttl("EXPIRETIME", seconds=True, relative=False)
_ttl("PEXPIRETIME", seconds=False, relative=False)


@command("PERSIST", arity=2, flags=_WRITE, keys=(1, 1, 1))
def persist(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    if db.find(key) is None or db.expires.pop(key, None) is None:
        return 0
    engine.changed(db, key, GENERIC, b"persist", args)
    return 1


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
    _created(to, target, b"copy_to")
    return 1


def _copy_options(session: Session, args: Sequence[bytes]) -> tuple[Database, bool]:
    to, replace = session.db, False
    at = 0
    while at < len(args):
        option = args[at].upper()
        if option == b"REPLACE":
            replace = True
        elif option == b"DB" and at + 1 < len(args):
            at += 1
            index = parse_int(args[at])
            if not 0 <= index < len(session.engine.databases):
                raise ErrorReply("ERR DB index is out of range")
            to = session.engine.databases[index]
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    return to, replace


def _created(db: Database, key: bytes, event: bytes) -> None:
    """Notifies of a newly created value, and records the commands that create it."""
    engine = db.engine
    engine.modified(db, key)
    engine.notify(db, GENERIC, event, key)
    if engine.recording:
        for args in effects_of_key(db, key):
            engine.record(db, *args)


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
    exists = db.find(key) is not None
    if exists and not replace:
        raise ErrorReply("BUSYKEY Target key name already exists.")
    ttl = parse_int(args[2])
    if ttl < 0:
        raise ErrorReply("ERR Invalid TTL value, must be >= 0")
    stream = _stream_of(session, payload)
    if exists:
        db.remove(key)
        engine.record(db, b"DEL", key)
    at_ms = ttl if absolute else engine.now_ms + ttl
    if ttl and at_ms <= engine.now_ms:
        if exists:
            engine.modified(db, key)
            engine.notify(db, GENERIC, b"del", key)
        return OK
    db.add(key, stream)
    if ttl:
        db.expire_at(key, at_ms)
    _created(db, key, b"restore")
    return OK


def _stream_of(session: Session, payload: bytes) -> Stream:
    if not is_valid(payload):
        raise ErrorReply("ERR DUMP payload version or checksum are wrong")
    try:
        return restore(payload, session.engine.config)
    except BadPayload as error:
        raise ErrorReply("ERR Bad data format") from error


def _restore_options(args: Sequence[bytes]) -> tuple[bool, bool]:
    """REPLACE, and ABSTTL. IDLETIME and FREQ are checked and ignored."""
    replace = absolute = False
    used: set[bytes] = set()
    at = 0
    while at < len(args):
        option = args[at].upper()
        if option == b"REPLACE":
            replace = True
        elif option == b"ABSTTL":
            absolute = True
        elif option in (b"IDLETIME", b"FREQ") and at + 1 < len(args) and not used - {option}:
            used.add(option)
            at += 1
            number = parse_int(args[at])
            if option == b"IDLETIME" and number < 0:
                raise ErrorReply("ERR Invalid IDLETIME value, must be >= 0")
            if option == b"FREQ" and not 0 <= number <= 255:
                raise ErrorReply("ERR Invalid FREQ value, must be >= 0 and <= 255")
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    return replace, absolute
