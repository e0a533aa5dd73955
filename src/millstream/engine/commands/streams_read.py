"""Streams: what reads entries without a group. XLEN, XRANGE, XREVRANGE, XREAD."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.blocking import Block
from millstream.engine.keyspace import Database
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.stream import Stream, reading
from millstream.engine.stream.ids import ID_MAX, parse_end, parse_id, parse_start
from millstream.engine.stream.read_options import BLOCKED_COUNT, ReadOptions
from millstream.wire import NIL_ARRAY, ErrorReply, Pairs, Reply

_GREATER_OUTSIDE_GROUP = (
    "ERR The > ID can be specified only when calling XREADGROUP using the GROUP <group> <consumer> option."
)


@command("XLEN", arity=2, flags=Flag.READONLY | Flag.FAST, keys=(1, 1, 1))
def xlen(session: Session, args: Sequence[bytes]) -> Reply:
    stream = session.db.read_as(args[1], Stream)
    return 0 if stream is None else stream.length


@command("XRANGE", arity=-4, flags=Flag.READONLY, keys=(1, 1, 1))
def xrange(session: Session, args: Sequence[bytes]) -> Reply:
    return _range(session, args, backwards=False)


@command("XREVRANGE", arity=-4, flags=Flag.READONLY, keys=(1, 1, 1))
def xrevrange(session: Session, args: Sequence[bytes]) -> Reply:
    return _range(session, args, backwards=True)


def _range(session: Session, args: Sequence[bytes], *, backwards: bool) -> Reply:
    lower, upper = (args[3], args[2]) if backwards else (args[2], args[3])
    first, last = parse_start(lower), parse_end(upper)
    count: int | None = None
    for at in range(4, len(args), 2):
        if args[at].upper() != b"COUNT" or at + 1 == len(args):
            raise ErrorReply(SYNTAX_ERROR)
        count = max(parse_int(args[at + 1]), 0)
    stream = session.db.read_as(args[1], Stream)
    if stream is None:
        return []
    if count == 0:
        return NIL_ARRAY
    read = reading.entries_back if backwards else reading.entries
    return read(stream, first, last, count or 0)


@command("XREAD", arity=-4, flags=Flag.READONLY | Flag.BLOCKING | Flag.MOVABLE_KEYS)
def xread(session: Session, args: Sequence[bytes]) -> Reply:
    options = ReadOptions.parse(args, "xread")
    db = session.db
    after = [_start(db, key, raw) for key, raw in options.streams]
    found = Pairs()
    for (key, _), last_seen in zip(options.streams, after, strict=True):
        stream = db.read_as(key, Stream)
        if stream is not None and stream.length and stream.top_id > last_seen:
            found.append([key, reading.entries(stream, last_seen + 1, ID_MAX, options.count)])
    if found:
        return found
    if options.block_ms is None or not session.may_block:
        return NIL_ARRAY
    return _wait(db, options, after)


def _start(db: Database, key: bytes, raw: bytes) -> int:
    """The id that the client has seen last. ``$`` is the stream's last one, as things stand now."""
    stream = db.read_as(key, Stream)
    if raw == b"$":
        return 0 if stream is None else stream.last_id
    if raw == b">":
        raise ErrorReply(_GREATER_OUTSIDE_GROUP)
    return parse_id(raw)


def _wait(db: Database, options: ReadOptions, after: list[int]) -> Block:
    seen: dict[bytes, int] = {}
    for (key, _), last_seen in zip(options.streams, after, strict=True):
        seen.setdefault(key, last_seen)

    def serve(key: bytes) -> Reply | None:
        stream = db.find(key)
        if type(stream) is not Stream or stream.last_id <= seen[key]:
            return None
        return Pairs([[key, reading.entries(stream, seen[key] + 1, ID_MAX, options.count or BLOCKED_COUNT)]])

    return Block(list(seen), options.block_ms, serve)
