"""List commands, including the blocking BLPOP and BRPOP."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from millstream.engine.keyspace import LIST
from millstream.engine.numbers import INT64_MAX, parse_float, parse_int, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Block, Session
from millstream.wire import NIL_ARRAY, OK, ErrorReply, Reply

_PUSH = Flag.WRITE | Flag.DENY_OOM | Flag.FAST
_POP = Flag.WRITE | Flag.FAST

List = deque[bytes]


def _push(session: Session, args: Sequence[bytes], *, left: bool) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    items = db.find_as(key, deque)
    if items is None:
        items = deque()
        db.add(key, items)
    if left:
        items.extendleft(args[2:])
    else:
        items.extend(args[2:])
    engine.changed(db, key, LIST, b"lpush" if left else b"rpush", args)
    return len(items)


@command("LPUSH", arity=-3, flags=_PUSH, keys=(1, 1, 1))
def lpush(session: Session, args: Sequence[bytes]) -> Reply:
    return _push(session, args, left=True)


@command("RPUSH", arity=-3, flags=_PUSH, keys=(1, 1, 1))
def rpush(session: Session, args: Sequence[bytes]) -> Reply:
    return _push(session, args, left=False)


def _pop(session: Session, args: Sequence[bytes], *, left: bool) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    name = b"lpop" if left else b"rpop"
    if len(args) > 3:
        raise ErrorReply(f"ERR wrong number of arguments for '{name.decode()}' command")
    count = None
    if len(args) == 3:
        count = parse_range(args[2], 0, INT64_MAX, "ERR value is out of range, must be positive")
    items: List | None = db.find_as(key, deque)
    if items is None:
        return None if count is None else NIL_ARRAY
    if count == 0:
        return []
    pop = items.popleft if left else items.pop
    taken = [pop() for _ in range(min(count or 1, len(items)))]
    engine.changed(db, key, LIST, name, args)
    if not items:
        engine.delete(db, key)
    return taken[0] if count is None else taken


@command("LPOP", arity=-2, flags=_POP, keys=(1, 1, 1))
def lpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop(session, args, left=True)


@command("RPOP", arity=-2, flags=_POP, keys=(1, 1, 1))
def rpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop(session, args, left=False)


@command("LLEN", arity=2, flags=Flag.READONLY | Flag.FAST, keys=(1, 1, 1))
def llen(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.db.read_as(args[1], deque) or ())


@command("LINDEX", arity=3, flags=Flag.READONLY, keys=(1, 1, 1))
def lindex(session: Session, args: Sequence[bytes]) -> Reply:
    items = session.db.read_as(args[1], deque)
    if items is None:
        return None
    at = parse_int(args[2])
    return items[at] if -len(items) <= at < len(items) else None


def _bounds(start: int, stop: int, length: int) -> tuple[int, int]:
    """Converts Redis's inclusive, possibly negative bounds to a Python slice with 0 <= start, ``stop`` not included."""
    start = max(start + length, 0) if start < 0 else start
    stop = stop + length if stop < 0 else stop
    return start, max(min(stop, length - 1) + 1, 0)


@command("LRANGE", arity=4, flags=Flag.READONLY, keys=(1, 1, 1))
def lrange(session: Session, args: Sequence[bytes]) -> Reply:
    start, stop = parse_int(args[2]), parse_int(args[3])
    items = session.db.read_as(args[1], deque)
    if items is None:
        return []
    start, stop = _bounds(start, stop, len(items))
    return list(islice(items, start, stop)) if start < stop else []


@command("LTRIM", arity=4, flags=Flag.WRITE, keys=(1, 1, 1))
def ltrim(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    start, stop = parse_int(args[2]), parse_int(args[3])
    items: List | None = db.find_as(key, deque)
    if items is None:
        return OK
    start, stop = _bounds(start, stop, len(items))
    db.values[key] = deque(islice(items, start, stop)) if start < stop else deque()
    engine.changed(db, key, LIST, b"ltrim", args)
    if not db.values[key]:
        engine.delete(db, key)
    return OK


@command("LREM", arity=4, flags=Flag.WRITE, keys=(1, 1, 1))
def lrem(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key, target = session.engine, session.db, args[1], args[3]
    count = parse_int(args[2])
    items: List | None = db.find_as(key, deque)
    if items is None:
        return 0
    remaining, removed = _without(reversed(items) if count < 0 else items, target, abs(count) or len(items))
    if removed:
        db.values[key] = deque(reversed(remaining)) if count < 0 else deque(remaining)
        engine.changed(db, key, LIST, b"lrem", args)
        if not remaining:
            engine.delete(db, key)
    return removed


def _without(items: Iterable[bytes], target: bytes, limit: int) -> tuple[list[bytes], int]:
    """The items without the first ``limit`` that equal ``target``, and the number of removed items."""
    remaining: list[bytes] = []
    removed = 0
    for item in items:
        if removed < limit and item == target:
            removed += 1
        else:
            remaining.append(item)
    return remaining, removed


_BLOCKING_FLAGS: Final = Flag.WRITE | Flag.NO_SCRIPT | Flag.BLOCKING

Pop = Callable[[Session, Sequence[bytes]], Reply]


def _wait_ms(raw: bytes) -> int:
    """Parses a timeout in seconds, which may have a fraction; 0 means no timeout."""
    seconds = parse_float(raw, "ERR timeout is not a float or out of range")
    if seconds < 0 or seconds * 1000 > INT64_MAX:
        raise ErrorReply("ERR timeout is negative")
    return math.ceil(seconds * 1000)


def _pop_or_wait(session: Session, args: Sequence[bytes], pop: Pop, name: bytes) -> Reply:
    db, keys = session.db, args[1:-1]
    wait_ms = _wait_ms(args[-1])
    for key in keys:
        if db.find_as(key, deque):
            return [key, pop(session, (name, key))]
    if not session.may_block:
        return NIL_ARRAY

    def serve(key: bytes) -> Reply | None:
        if type(db.find(key)) is not deque:
            return None
        selected, session.db = session.db, db
        try:
            return [key, pop(session, (name, key))]
        finally:
            session.db = selected

    return Block(keys, wait_ms, serve)


@command("BLPOP", arity=-3, flags=_BLOCKING_FLAGS, keys=(1, -2, 1))
def blpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop_or_wait(session, args, lpop, b"LPOP")


@command("BRPOP", arity=-3, flags=_BLOCKING_FLAGS, keys=(1, -2, 1))
def brpop(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop_or_wait(session, args, rpop, b"RPOP")
