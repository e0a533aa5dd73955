"""Sorted set commands, including ranges by rank, score and member."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from millstream.engine.keyspace import SORTED_SET
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_bound, parse_float, parse_int, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.sorted_set import Item, SortedSet
from millstream.wire import Double, ErrorReply, Reply

_READ = Flag.READONLY | Flag.FAST


class _AddOptions:
    __slots__ = ("ch", "gt", "incr", "lt", "nx", "pairs", "xx")

    def __init__(self, args: Sequence[bytes]) -> None:
        options: set[bytes] = set()
        at = 2
        while at < len(args) and (option := args[at].upper()) in (b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR"):
            options.add(option)
            at += 1
        self.nx, self.xx, self.gt, self.lt, self.ch, self.incr = (
            option in options for option in (b"NX", b"XX", b"GT", b"LT", b"CH", b"INCR")
        )
        pair_args = args[at:]
        if not pair_args or len(pair_args) % 2:
            raise ErrorReply(SYNTAX_ERROR)
        if self.nx and self.xx:
            raise ErrorReply("ERR XX and NX options at the same time are not compatible")
        if (self.gt and self.nx) or (self.lt and self.nx) or (self.gt and self.lt):
            raise ErrorReply("ERR GT, LT, and/or NX options at the same time are not compatible")
        if self.incr and len(pair_args) > 2:
            raise ErrorReply("ERR INCR option supports a single increment-element pair")
        self.pairs = [(parse_float(pair_args[i]), pair_args[i + 1]) for i in range(0, len(pair_args), 2)]

    def new_score(self, old: float | None, new: float) -> float | None:
        """The new score of the member; None if the options leave the member unchanged."""
        if old is None:
            return None if self.xx else new
        if self.nx:
            return None
        score = old + new if self.incr else new
        if math.isnan(score):
            raise ErrorReply("ERR resulting score is not a number (NaN)")
        if (self.gt and score <= old) or (self.lt and score >= old):
            return None
        return score


@command("ZADD", arity=-4, flags=Flag.WRITE | Flag.DENY_OOM | Flag.FAST, keys=(1, 1, 1))
def zadd(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    options = _AddOptions(args)
    existing = db.find_as(key, SortedSet)
    if existing is None and options.xx:
        return None if options.incr else 0
    members = existing or SortedSet()
    added = updated = 0
    score: float | None = None
    for number, member in options.pairs:
        old = members.scores.get(member)
        score = options.new_score(old, number)
        if score is None:
            continue
        if old is None:
            added += 1
        elif score != old:
            updated += 1
        members.put(member, score)
    if existing is None and members:
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
    limit = min(1 if count is None else count, size)
    taken = members.slice(size - limit, size)[::-1] if greatest else members.slice(0, limit)
    for _, member in taken:
        members.discard(member)
    event = b"zpopmax" if greatest else b"zpopmin"
    engine.changed(db, key, SORTED_SET, event, (b"ZREM", key, *(member for _, member in taken)))
    if not members:
        engine.delete(db, key)
    pairs: list[Reply] = [[member, Double(score)] for score, member in taken]
    if session.protocol == 3 and count is not None:
        return pairs
    return [item for score, member in taken for item in (member, Double(score))]


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


NOT_A_SCORE = "ERR min or max is not a float"
NOT_A_MEMBER = "ERR min or max not valid string range item"

Span = tuple[int, int]
"""The start rank and the stop rank (not included)."""


def _score_bound(raw: bytes) -> tuple[float, bool]:
    """The score, and whether it is excluded."""
    if raw.startswith(b"("):
        return parse_bound(raw[1:], NOT_A_SCORE), True
    return parse_bound(raw, NOT_A_SCORE), False


def _span_by_score(low: bytes, high: bytes) -> Callable[[SortedSet], Span]:
    (low_score, low_excluded), (high_score, high_excluded) = _score_bound(low), _score_bound(high)

    def span(members: SortedSet) -> Span:
        return _below(members, low_score, including=low_excluded), _below(
            members, high_score, including=not high_excluded
        )

    return span


def _below(members: SortedSet, score: float, *, including: bool) -> int:
    """The number of members with a smaller score, or with ``including``, also with the same score."""
    if not including:
        return members.count_below((score,))
    return len(members) if score == math.inf else members.count_below((math.nextafter(score, math.inf),))


def _span_by_member(low: bytes, high: bytes) -> Callable[[SortedSet], Span]:
    """The span of a range by member. Like Redis, assumes that all scores are equal."""
    bounds = [_member_bound(low), _member_bound(high)]

    def span(members: SortedSet) -> Span:
        names = [name for _, name in members]
        start = next((at for at, name in enumerate(names) if _is_above(name, bounds[0])), len(names))
        stop = next((at for at in range(start, len(names)) if _is_over(names[at], bounds[1])), len(names))
        return (start, stop) if _in_order(bounds) else (0, 0)

    return span


_Bound = tuple[int, bytes, bool]
"""-1 or 1 for an unbounded end, else 0; the member; whether it is excluded."""


def _member_bound(raw: bytes) -> _Bound:
    if raw == b"-":
        return -1, b"", False
    if raw == b"+":
        return 1, b"", False
    if raw[:1] in (b"[", b"("):
        return 0, raw[1:], raw[:1] == b"("
    raise ErrorReply(NOT_A_MEMBER)


def _is_above(name: bytes, bound: _Bound) -> bool:
    end, member, excluded = bound
    return end < 0 or (end == 0 and (name > member if excluded else name >= member))


def _is_over(name: bytes, bound: _Bound) -> bool:
    end, member, excluded = bound
    return end < 0 or (end == 0 and (name >= member if excluded else name > member))


def _in_order(bounds: Sequence[_Bound]) -> bool:
    (low_end, low, low_excluded), (high_end, high, high_excluded) = bounds
    if (low_end, low) != (high_end, high):
        return (low_end, low) < (high_end, high)
    return not (low_excluded or high_excluded)


def _span_by_rank(low: bytes, high: bytes, *, reverse: bool) -> Callable[[SortedSet], Span]:
    first, last = parse_int(low), parse_int(high)

    def span(members: SortedSet) -> Span:
        length = len(members)
        start = max(first + length, 0) if first < 0 else first
        stop = min(last + length if last < 0 else last, length - 1) + 1
        if start >= stop:
            return 0, 0
        return (length - stop, length - start) if reverse else (start, stop)

    return span


class _RangeOptions:
    """The options after the bounds of a range."""

    __slots__ = ("by", "count", "offset", "reverse", "with_scores")

    def __init__(self, args: Sequence[bytes], *, full: bool) -> None:
        self.by = b"" if full else b"BYSCORE"
        self.reverse = self.with_scores = False
        self.offset, self.count = 0, -1
        at = 0
        while at < len(args):
            arg = args[at].upper()
            if arg == b"WITHSCORES":
                self.with_scores = True
            elif arg == b"LIMIT" and at + 2 < len(args):
                self.offset, self.count = parse_int(args[at + 1]), parse_int(args[at + 2])
                at += 2
            elif full and arg == b"REV" and not self.reverse:
                self.reverse = True
            elif full and arg in (b"BYSCORE", b"BYLEX") and not self.by:
                self.by = arg
            else:
                raise ErrorReply(SYNTAX_ERROR)
            at += 1
        if not self.by and self.count != -1:
            raise ErrorReply("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
        if self.by == b"BYLEX" and self.with_scores:
            raise ErrorReply("ERR syntax error, WITHSCORES not supported in combination with BYLEX")

    def span(self, low: bytes, high: bytes) -> Callable[[SortedSet], Span]:
        if not self.by:
            return _span_by_rank(low, high, reverse=self.reverse)
        if self.reverse:
            low, high = high, low
        return _span_by_score(low, high) if self.by == b"BYSCORE" else _span_by_member(low, high)

    def limited(self, items: list[Item]) -> list[Item]:
        if not self.by:
            return items
        if self.offset < 0:
            return []
        return items[self.offset : None if self.count < 0 else self.offset + self.count]


def _range(session: Session, args: Sequence[bytes], *, full: bool) -> Reply:
    options = _RangeOptions(args[4:], full=full)
    span = options.span(args[2], args[3])
    members = session.db.read_as(args[1], SortedSet)
    if members is None:
        return []
    items = members.slice(*span(members))
    if options.reverse:
        items.reverse()
    items = options.limited(items)
    if not options.with_scores:
        return [member for _, member in items]
    if session.protocol == 2:
        return [item for score, member in items for item in (member, Double(score))]
    return [[member, Double(score)] for score, member in items]


@command("ZRANGE", arity=-4, flags=Flag.READONLY, keys=(1, 1, 1))
def zrange(session: Session, args: Sequence[bytes]) -> Reply:
    return _range(session, args, full=True)


@command("ZRANGEBYSCORE", arity=-4, flags=Flag.READONLY, keys=(1, 1, 1))
def zrangebyscore(session: Session, args: Sequence[bytes]) -> Reply:
    return _range(session, args, full=False)


@command("ZCOUNT", arity=4, flags=Flag.READONLY | Flag.FAST, keys=(1, 1, 1))
def zcount(session: Session, args: Sequence[bytes]) -> Reply:
    span = _span_by_score(args[2], args[3])
    members = session.db.read_as(args[1], SortedSet)
    start, stop = (0, 0) if members is None else span(members)
    return max(stop - start, 0)


@command("ZREMRANGEBYSCORE", arity=4, flags=Flag.WRITE, keys=(1, 1, 1))
def zremrangebyscore(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    span = _span_by_score(args[2], args[3])
    members = db.find_as(key, SortedSet)
    if members is None:
        return 0
    removed = members.slice(*span(members))
    for _, member in removed:
        members.discard(member)
    if removed:
        engine.changed(db, key, SORTED_SET, b"zremrangebyscore", args)
        if not members:
            engine.delete(db, key)
    return len(removed)
