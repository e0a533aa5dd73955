"""Hash commands."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.keyspace import HASH, Database, ScanOptions, is_small_hash, parse_cursor
from millstream.engine.numbers import INT64_MAX, INT64_MIN, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import OK, ErrorReply, Map, Reply

_WRITE = Flag.WRITE | Flag.DENY_OOM | Flag.FAST
_READ = Flag.READONLY | Flag.FAST

Hash = dict[bytes, bytes]


def _find(db: Database, key: bytes) -> Hash:
    return db.read_as(key, dict) or {}


def _find_or_add(db: Database, key: bytes) -> Hash:
    fields = db.find_as(key, dict)
    if fields is None:
        fields = {}
        db.add(key, fields)
    return fields


def _set(session: Session, args: Sequence[bytes], name: str) -> int:
    if len(args) % 2:
        raise ErrorReply(f"ERR wrong number of arguments for '{name}' command")
    db, key = session.db, args[1]
    fields = _find_or_add(db, key)
    before = len(fields)
    fields.update(zip(args[2::2], args[3::2], strict=True))
    session.engine.changed(db, key, HASH, b"hset", args)
    return len(fields) - before


@command("HSET", arity=-4, flags=_WRITE, keys=(1, 1, 1))
def hset(session: Session, args: Sequence[bytes]) -> Reply:
    return _set(session, args, "hset")


@command("HMSET", arity=-4, flags=_WRITE, keys=(1, 1, 1))
def hmset(session: Session, args: Sequence[bytes]) -> Reply:
    _set(session, args, "hmset")
    return OK


@command("HSETNX", arity=4, flags=_WRITE, keys=(1, 1, 1))
def hsetnx(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[1]
    if args[2] in (db.find_as(key, dict) or {}):
        return 0
    _find_or_add(db, key)[args[2]] = args[3]
    session.engine.changed(db, key, HASH, b"hset", args)
    return 1


@command("HGET", arity=3, flags=_READ, keys=(1, 1, 1))
def hget(session: Session, args: Sequence[bytes]) -> Reply:
    return _find(session.db, args[1]).get(args[2])


@command("HMGET", arity=-3, flags=_READ, keys=(1, 1, 1))
def hmget(session: Session, args: Sequence[bytes]) -> Reply:
    fields = _find(session.db, args[1])
    return [fields.get(name) for name in args[2:]]


@command("HGETALL", arity=2, flags=Flag.READONLY, keys=(1, 1, 1))
def hgetall(session: Session, args: Sequence[bytes]) -> Reply:
    return Map(item for pair in _find(session.db, args[1]).items() for item in pair)


@command("HKEYS", arity=2, flags=Flag.READONLY, keys=(1, 1, 1))
def hkeys(session: Session, args: Sequence[bytes]) -> Reply:
    return list(_find(session.db, args[1]))


@command("HVALS", arity=2, flags=Flag.READONLY, keys=(1, 1, 1))
def hvals(session: Session, args: Sequence[bytes]) -> Reply:
    return list(_find(session.db, args[1]).values())


@command("HLEN", arity=2, flags=_READ, keys=(1, 1, 1))
def hlen(session: Session, args: Sequence[bytes]) -> Reply:
    return len(_find(session.db, args[1]))


@command("HEXISTS", arity=3, flags=_READ, keys=(1, 1, 1))
def hexists(session: Session, args: Sequence[bytes]) -> Reply:
    return int(args[2] in _find(session.db, args[1]))


@command("HDEL", arity=-3, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def hdel(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    fields = db.find_as(key, dict)
    if fields is None:
        return 0
    removed = sum(fields.pop(name, None) is not None for name in args[2:])
    if removed:
        engine.changed(db, key, HASH, b"hdel", args)
        if not fields:
            engine.delete(db, key)
    return removed


@command("HINCRBY", arity=4, flags=_WRITE, keys=(1, 1, 1))
def hincrby(session: Session, args: Sequence[bytes]) -> Reply:
    db, key, name = session.db, args[1], args[2]
    amount = parse_int(args[3])
    old = (db.find_as(key, dict) or {}).get(name)
    total = amount + (0 if old is None else parse_int(old, "ERR hash value is not an integer"))
    if not INT64_MIN <= total <= INT64_MAX:
        raise ErrorReply("ERR increment or decrement would overflow")
    _find_or_add(db, key)[name] = b"%d" % total
    session.engine.changed(db, key, HASH, b"hincrby", args)
    return total


@command("HSCAN", arity=-3, flags=Flag.READONLY, keys=(1, 1, 1))
def hscan(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[1]
    cursor = parse_cursor(args[2])
    fields = _find(db, key)
    options = ScanOptions(args[3:]) if fields else None
    if options is None:
        return [b"0", []]
    next_cursor, names = 0, list(fields)
    if not is_small_hash(fields):
        next_cursor, names = session.engine.scan_orders.page((db.index, key), fields, cursor, options.count)
    matching = [name for name in names if name in fields and options.matches(name)]
    return [b"%d" % next_cursor, [item for name in matching for item in (name, fields[name])]]
