"""Set commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream.engine.keyspace import SET, ScanOptions, is_small_set, parse_cursor
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.wire import ErrorReply, Members, Reply

_READ = Flag.READONLY | Flag.FAST

MAX_UNIFORM_DRAW: Final = 1024
"""SPOP draws uniformly from sets up to this size. From a larger set it takes the first members in hash order, which
differs between processes, because listing the whole set for each draw would be too slow."""


@command("SADD", arity=-3, flags=Flag.WRITE | Flag.DENY_OOM | Flag.FAST, keys=(1, 1, 1))
def sadd(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    members = db.find_as(key, set)
    if members is None:
        members = set()
        db.add(key, members)
    before = len(members)
    members.update(args[2:])
    added = len(members) - before
    if added:
        engine.changed(db, key, SET, b"sadd", args)
    return added


@command("SREM", arity=-3, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def srem(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    members = db.find_as(key, set)
    if members is None:
        return 0
    before = len(members)
    members.difference_update(args[2:])
    removed = before - len(members)
    if removed:
        engine.changed(db, key, SET, b"srem", args)
        if not members:
            engine.delete(db, key)
    return removed


@command("SMEMBERS", arity=2, flags=Flag.READONLY, keys=(1, 1, 1))
def smembers(session: Session, args: Sequence[bytes]) -> Reply:
    return Members(session.db.read_as(args[1], set) or ())


@command("SISMEMBER", arity=3, flags=_READ, keys=(1, 1, 1))
def sismember(session: Session, args: Sequence[bytes]) -> Reply:
    return int(args[2] in (session.db.read_as(args[1], set) or ()))


@command("SMISMEMBER", arity=-3, flags=_READ, keys=(1, 1, 1))
def smismember(session: Session, args: Sequence[bytes]) -> Reply:
    members = session.db.read_as(args[1], set) or ()
    return [int(name in members) for name in args[2:]]


@command("SCARD", arity=2, flags=_READ, keys=(1, 1, 1))
def scard(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.db.read_as(args[1], set) or ())


@command("SPOP", arity=-2, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def spop(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    if len(args) > 3:
        raise ErrorReply(SYNTAX_ERROR)
    count = None
    if len(args) == 3:
        count = parse_range(args[2], 0, INT64_MAX, "ERR value is out of range, must be positive")
    members: set[bytes] | None = db.find_as(key, set)
    if members is None or count == 0:
        return None if count is None else Members()
    taken = _draw(session, members, min(1 if count is None else count, len(members)))
    engine.changed(db, key, SET, b"spop", (b"SREM", key, *taken))
    if not members:
        engine.delete(db, key)
    return taken[0] if count is None else Members(taken)


def _draw(session: Session, members: set[bytes], count: int) -> list[bytes]:
    if len(members) > MAX_UNIFORM_DRAW:
        return [members.pop() for _ in range(count)]
    taken = session.engine.random.sample(sorted(members), count)
    members.difference_update(taken)
    return taken


@command("SSCAN", arity=-3, flags=Flag.READONLY, keys=(1, 1, 1))
def sscan(session: Session, args: Sequence[bytes]) -> Reply:
    db, key = session.db, args[1]
    cursor = parse_cursor(args[2])
    members: set[bytes] = db.read_as(key, set) or set()
    if not members:
        return [b"0", []]
    options = ScanOptions(args[3:])
    next_cursor, names = 0, list(members)
    if not is_small_set(members):
        next_cursor, names = session.engine.scan_orders.page((db.index, key), members, cursor, options.count)
    matching = [name for name in names if name in members and options.matches(name)]
    return [b"%d" % next_cursor, matching]
