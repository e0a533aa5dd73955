"""String commands."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.expiry import ExpireOptions
from millstream.engine.keyspace import GENERIC, STRING, Database
from millstream.engine.numbers import INT64_MAX, INT64_MIN, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import OK, ErrorReply, Reply

_WRITE = Flag.WRITE | Flag.DENY_OOM
_READ = Flag.READONLY | Flag.FAST


def _store(db: Database, key: bytes, value: bytes, *, keep_ttl: bool = False) -> None:
    """Stores a string; replaces an existing value of any type."""
    engine = db.engine
    if key in db.values:
        db.values[key] = value
        if not keep_ttl:
            db.expires.pop(key, None)
    else:
        db.add(key, value)
    engine.modified(db, key)
    engine.notify(db, STRING, b"set", key)


@command("GET", arity=2, flags=_READ, keys=(1, 1, 1))
def get(session: Session, args: Sequence[bytes]) -> Reply:
    return session.db.read_as(args[1], bytes)


@command("SET", arity=-3, flags=_WRITE, keys=(1, 1, 1))
def set_(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key, value = session.engine, session.db, args[1], args[2]
    if len(args) == 3:
        db.find(key)
        _store(db, key, value)
        if engine.recording:
            engine.record(db, b"SET", key, value)
        return OK
    options = ExpireOptions.for_set(args)
    at_ms = options.at_ms(engine.now_ms, "set")
    old = db.find(key)
    if options.get:
        old = db.read_as(key, bytes)
    if (options.nx and old is not None) or (options.xx and old is None):
        return old if options.get else None
    _store(db, key, value, keep_ttl=options.keep_ttl)
    effect = [b"SET", key, value]
    if at_ms is not None:
        db.expire_at(key, at_ms)
        engine.notify(db, GENERIC, b"expire", key)
        effect += (b"PXAT", b"%d" % at_ms)
    elif options.keep_ttl:
        effect.append(b"KEEPTTL")
    engine.record(db, *effect)
    return old if options.get else OK


@command("SETNX", arity=3, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def setnx(session: Session, args: Sequence[bytes]) -> Reply:
    db = session.db
    if db.find(args[1]) is not None:
        return 0
    _store(db, args[1], args[2])
    session.engine.record(db, b"SET", args[1], args[2])
    return 1


def _set_for(session: Session, key: bytes, value: bytes, time: bytes, *, seconds: bool, name: str) -> Reply:
    engine, db = session.engine, session.db
    option = ExpireOptions()
    option.unit, option.amount = (b"EX" if seconds else b"PX"), time
    at_ms = option.at_ms(engine.now_ms, name)
    assert at_ms is not None
    db.find(key)
    _store(db, key, value)
    db.expire_at(key, at_ms)
    engine.notify(db, GENERIC, b"expire", key)
    engine.record(db, b"SET", key, value, b"PXAT", b"%d" % at_ms)
    return OK


@command("SETEX", arity=4, flags=_WRITE, keys=(1, 1, 1))
def setex(session: Session, args: Sequence[bytes]) -> Reply:
    return _set_for(session, args[1], args[3], args[2], seconds=True, name="setex")


@command("PSETEX", arity=4, flags=_WRITE, keys=(1, 1, 1))
def psetex(session: Session, args: Sequence[bytes]) -> Reply:
    return _set_for(session, args[1], args[3], args[2], seconds=False, name="psetex")


@command("GETDEL", arity=2, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def getdel(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[1]
    value = db.read_as(key, bytes)
    if value is not None:
        session.engine.delete(db, key)
        session.engine.record(db, b"DEL", key)
    return value


@command("GETEX", arity=-2, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def getex(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    options = ExpireOptions.for_getex(args)
    value = db.read_as(key, bytes)
    if value is None:
        return None
    at_ms = options.at_ms(engine.now_ms, "getex")
    if at_ms is not None:
        if options.absolute and at_ms <= engine.now_ms and not engine.loading:
            engine.delete(db, key)
            engine.record(db, b"DEL", key)
            return value
        db.expire_at(key, at_ms)
        engine.modified(db, key)
        engine.notify(db, GENERIC, b"expire", key)
        engine.record(db, b"PEXPIREAT", key, b"%d" % at_ms)
    elif options.persist and db.expires.pop(key, None) is not None:
        engine.modified(db, key)
        engine.notify(db, GENERIC, b"persist", key)
        engine.record(db, b"PERSIST", key)
    return value


@command("MGET", arity=-2, flags=_READ, keys=(1, -1, 1))
def mget(session: Session, args: Sequence[bytes]) -> Reply:
    values = (session.db.read(key) for key in args[1:])
    return [value if type(value) is bytes else None for value in values]


@command("MSET", arity=-3, flags=_WRITE, keys=(1, -1, 2))
def mset(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) % 2 == 0:
        raise ErrorReply("ERR wrong number of arguments for 'mset' command")
    db = session.db
    for key, value in zip(args[1::2], args[2::2], strict=True):
        db.find(key)
        _store(db, key, value)
    session.engine.record(db, *args)
    return OK


@command("APPEND", arity=3, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def append(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key, tail = session.engine, session.db, args[1], args[2]
    value = db.find_as(key, bytes)
    if value is None:
        db.add(key, tail)
        length = len(tail)
    else:
        length = len(value) + len(tail)
        if length > engine.config.number("proto-max-bulk-len"):
            raise ErrorReply("ERR string exceeds maximum allowed size (proto-max-bulk-len)")
        db.values[key] = value + tail
    engine.changed(db, key, STRING, b"append", args)
    return length


@command("STRLEN", arity=2, flags=_READ, keys=(1, 1, 1))
def strlen(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.db.read_as(args[1], bytes) or b"")


def _add(session: Session, key: bytes, amount: int, effect: Sequence[bytes]) -> Reply:
    engine, db = session.engine, session.db
    value = db.find_as(key, bytes)
    number = 0 if value is None else parse_int(value)
    total = number + amount
    if not INT64_MIN <= total <= INT64_MAX:
        raise ErrorReply("ERR increment or decrement would overflow")
    if value is None:
        db.add(key, b"%d" % total)
    else:
        db.values[key] = b"%d" % total
    engine.changed(db, key, STRING, b"incrby", effect)
    return total


@command("INCR", arity=2, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def incr(session: Session, args: Sequence[bytes]) -> Reply:
    return _add(session, args[1], 1, args)


@command("DECR", arity=2, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def decr(session: Session, args: Sequence[bytes]) -> Reply:
    return _add(session, args[1], -1, args)


@command("INCRBY", arity=3, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def incrby(session: Session, args: Sequence[bytes]) -> Reply:
    return _add(session, args[1], parse_int(args[2]), args)


@command("DECRBY", arity=3, flags=_WRITE | Flag.FAST, keys=(1, 1, 1))
def decrby(session: Session, args: Sequence[bytes]) -> Reply:
    amount = parse_int(args[2])
    if amount == INT64_MIN:
        raise ErrorReply("ERR decrement would overflow")
    return _add(session, args[1], -amount, args)
