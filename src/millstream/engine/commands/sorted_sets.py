"""Sorted sets: members by score. Ranges are in ``sorted_set_ranges``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millstream.engine.notifications import SORTED_SET
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_float, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.sorted_set import SortedSet
from millstream.wire.replies import Double, ErrorReply, Reply

_READ = Flag.READONLY | Flag.FAST


class _AddOptions:
    __slots__ = ("ch", "gt", "incr", "lt", "nx", "pairs", "xx")

    def __init__(self, args: Sequence[bytes]) -> None:
        given: set[bytes] = set()
        at = 2
        while at < len(args) and (word := args[at].upper()) in (b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR"):
            given.add(word)
            at += 1
        self.nx, self.xx, self.gt, self.lt, self.ch, self.incr = (
            word in given for word in (b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR")
        )
        words = args[at:]
        if not words or len(words) % 2:
            raise ErrorReply(SYNTAX_ERROR)
        if self.nx and self.xx:
            raise ErrorReply("ERR XX and NX options at the same time are not compatible")
        if (self.gt and self.nx) or (self.lt and self.nx) or (self.gt and self.lt):
            raise ErrorReply("ERR GT, LT, and/or NX options at the same time are not compatible")
        if self.incr and len(words) > 2:
            raise ErrorReply("ERR INCR option supports a single increment-element pair")
        self.pairs = [(parse_float(words[i]), words[i + 1]) for i in range(0, len(words), 2)]

    def new_score(self, old: float | None, given: float) -> float | None:
        """The score that the member gets; None where the options leave it alone."""
        if old is None:
            return None if self.xx else given
        if self.nx:
            return None
        score = old + given if self.incr else given
        if math.isnan(score):
            raise ErrorReply("ERR resulting score is not a number (NaN)")
        if (self.gt and score <= old) or (self.lt and score >= old):
            return None
        return score


@command("ZADD", arity=-4, flags=Flag.WRITE | Flag.DENY_OOM | Flag.FAST, keys=(1, 1, 1))
def zadd(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    options = _AddOptions(args)
    found = db.find_as(key, SortedSet)
    if found is None and options.xx:
        return None if options.incr else 0
    members = found or SortedSet()
    added = updated = 0
    score: float | None = None
    for given, member in options.pairs:
        old = members.scores.get(member)
        score = options.new_score(old, given)
        if score is None:
            continue
        if old is None:
            added += 1
        elif score != old:
            updated += 1
        members.put(member, score)
    if found is None and members:
        db.add(key, members)
    if added or updated:
        engine.changed(db, key, SORTED_SET, b"zincr" if options.incr else b"zadd", args)
    if options.incr:
        return None if score is None else Double(score)
    return added + updated if options.ch else added


@command("ZREM", arity=-3, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def zrem(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    members = db.find_as(key, SortedSet)
    if members is None:
        return 0
    removed = sum(members.discard(name) for name in args[2:])
    if removed:
        engine.changed(db, key, SORTED_SET, b"zrem", args)
        if not members:
            engine.delete(db, key)
    return removed


@command("ZPOPMIN", arity=-2, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def zpopmin(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop(session, args, greatest=False)


@command("ZPOPMAX", arity=-2, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def zpopmax(session: Session, args: Sequence[bytes]) -> Reply:
    return _pop(session, args, greatest=True)


def _pop(session: Session, args: Sequence[bytes], *, greatest: bool) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    if len(args) > 3:
        raise ErrorReply(SYNTAX_ERROR)
    count = None
    if len(args) == 3:
        count = parse_range(args[2], 0, INT64_MAX, "ERR value is out of range, must be positive")
    members = db.find_as(key, SortedSet)
    if members is None or count == 0:
        return []
    size = len(members)
    most = min(1 if count is None else count, size)
    taken = members.slice(size - most, size)[::-1] if greatest else members.slice(0, most)
    for _, member in taken:
        members.discard(member)
    event = b"zpopmax" if greatest else b"zpopmin"
    engine.changed(db, key, SORTED_SET, event, (b"ZREM", key, *(member for _, member in taken)))
    if not members:
        engine.delete(db, key)
    pairs: list[Reply] = [[member, Double(score)] for score, member in taken]
    if session.protocol == 3 and count is not None:
        return pairs
    return [word for score, member in taken for word in (member, Double(score))]


@command("ZSCORE", arity=3, flags=_READ, keys=(1, 1, 1))
def zscore(session: Session, args: Sequence[bytes]) -> Reply:
    members = session.db.read_as(args[1], SortedSet)
    score = None if members is None else members.scores.get(args[2])
    return None if score is None else Double(score)


@command("ZCARD", arity=2, flags=_READ, keys=(1, 1, 1))
def zcard(session: Session, args: Sequence[bytes]) -> Reply:
    return len(session.db.read_as(args[1], SortedSet) or ())


@command("ZRANK", arity=3, flags=_READ, keys=(1, 1, 1))
def zrank(session: Session, args: Sequence[bytes]) -> Reply:
    members = session.db.read_as(args[1], SortedSet)
    return None if members is None else members.rank(args[2])
