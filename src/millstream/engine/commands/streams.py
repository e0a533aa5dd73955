"""Stream commands without a group: XLEN, XRANGE, XREVRANGE, XREAD, XADD, XDEL, XTRIM, XSETID."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from millstream.engine.keyspace import STREAM, Database
from millstream.engine.numbers import SYNTAX_ERROR, parse_int
from millstream.engine.registry import Flag, command
from millstream.engine.session import Block, Session
from millstream.engine.stream import Stream, reading
from millstream.engine.stream.ids import (
    ID_MAX,
    SEQ_BITS,
    SEQ_MAX,
    format_id,
    parse_end,
    parse_id,
    parse_new_id,
    parse_start,
    plain_id,
)
from millstream.engine.stream.reading import (
    MAX_ENTRIES_AFTER_BLOCK,
    ReadOptions,
    modified_without_wake,
    modified_without_watch,
)
from millstream.engine.stream.stream import EXHAUSTED, Trim
from millstream.wire import NIL_ARRAY, OK, ErrorReply, Pairs, Reply

if TYPE_CHECKING:
    from millstream.engine.engine import Engine

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
    replies = Pairs()
    for (key, _), last_seen in zip(options.streams, after, strict=True):
        stream = db.read_as(key, Stream)
        if stream is not None and stream.length and stream.top_id > last_seen:
            replies.append([key, reading.entries(stream, last_seen + 1, ID_MAX, options.count)])
    if replies:
        return replies
    if options.block_ms is None or not session.may_block:
        return NIL_ARRAY
    return _wait(db, options, after)


def _start(db: Database, key: bytes, raw: bytes) -> int:
    """The id after which to read. ``$`` is the current last id of the stream."""
    stream = db.read_as(key, Stream)
    if raw == b"$":
        return 0 if stream is None else stream.last_id
    if raw == b">":
        raise ErrorReply(_GREATER_OUTSIDE_GROUP)
    return parse_id(raw)


def _wait(db: Database, options: ReadOptions, after: list[int]) -> Block:
    last_seen_ids: dict[bytes, int] = {}
    for (key, _), last_seen in zip(options.streams, after, strict=True):
        last_seen_ids.setdefault(key, last_seen)

    def serve(key: bytes) -> Reply | None:
        stream = db.find(key)
        if type(stream) is not Stream or stream.last_id <= last_seen_ids[key]:
            return None
        return Pairs(
            [[key, reading.entries(stream, last_seen_ids[key] + 1, ID_MAX, options.count or MAX_ENTRIES_AFTER_BLOCK)]]
        )

    return Block(list(last_seen_ids), options.block_ms, serve)


_TWO_TRIMS = "ERR syntax error, MAXLEN and MINID options at the same time are not compatible"
_LIMIT_ALONE = "ERR syntax error, LIMIT cannot be used without specifying a trimming strategy"
_LIMIT_EXACT = "ERR syntax error, LIMIT cannot be used without the special ~ option"
_NO_TRIM = "ERR syntax error, XTRIM must be called with a trimming strategy"
_ZERO_ID = "ERR The ID specified in XADD must be greater than 0-0"
_SMALL_ID = "ERR The ID specified in XADD is equal or smaller than the target stream top item"


@command("XADD", arity=-5, flags=Flag.WRITE | Flag.DENY_OOM | Flag.FAST, keys=(1, 1, 1))
def xadd(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    at, requested_id, trim, create = _NO_OPTIONS if args[2] == b"*" else _xadd_options(engine, args)
    fields = (args[at + 1], args[at + 2]) if len(args) == at + 3 else _field_args(args, at + 1)
    if requested_id is not None and requested_id == (0, True):
        raise ErrorReply(_ZERO_ID)
    stream = db.values.get(key)
    if type(stream) is not Stream or db.expires:
        stream = db.find_as(key, Stream)
        if stream is None:
            if not create:
                return None
            stream = Stream(engine.config)
            db.add(key, stream)
    if requested_id is None:
        raw = stream.append_now(engine.now_ms, fields)
    else:
        entry_id = _next_id(stream, requested_id)
        stream.append(entry_id >> SEQ_BITS, entry_id & SEQ_MAX, fields)
        raw = format_id(entry_id)
    if db.observed:
        engine.modified(db, key)
    else:
        engine.dirty += 1
    if engine.notify_flags:
        engine.notify(db, STREAM, b"xadd", key)
    if engine.recording:
        engine.record(db, b"XADD", key, raw, *fields)
    if trim is not None and trim.apply(stream):
        engine.notify(db, STREAM, b"xtrim", key)
        _record_trim(db, key, stream)
    return raw


def _field_args(args: Sequence[bytes], start: int) -> tuple[bytes, ...]:
    fields = tuple(args[start:])
    if not fields or len(fields) & 1:
        raise ErrorReply("ERR wrong number of arguments for 'xadd' command")
    return fields


def _next_id(stream: Stream, requested_id: tuple[int, bool]) -> int:
    last_id = stream.last_id
    if last_id == ID_MAX:
        raise ErrorReply(EXHAUSTED)
    entry_id, complete = requested_id
    if not complete and entry_id >> SEQ_BITS == stream.last_ms:
        if stream.last_seq == SEQ_MAX:
            raise ErrorReply(_SMALL_ID)
        return last_id + 1
    if entry_id <= last_id:
        raise ErrorReply(_SMALL_ID)
    return entry_id


_XaddOptions = tuple[int, tuple[int, bool] | None, Trim | None, bool]
"""The index of the id argument; the id and whether it has a sequence number (None for ``*``); the trimming; and whether
to create a missing stream."""

_NO_OPTIONS: Final[_XaddOptions] = (2, None, None, True)


def _xadd_options(engine: Engine, args: Sequence[bytes]) -> _XaddOptions:
    entry_id = plain_id(args[2])
    return _parse(engine, args, adding=True) if entry_id is None else (2, (entry_id, True), None, True)


def _parse(engine: Engine, args: Sequence[bytes], *, adding: bool) -> _XaddOptions:
    """Parses the options of XADD and XTRIM. The order of the checks decides which error the client receives."""
    max_len: int | None = None
    min_id: int | None = None
    approximate, create = False, True
    limit: int | None = None
    entry_id: tuple[int, bool] | None = None
    at, last = 2, len(args) - 1
    while at <= last:
        option = args[at].upper()
        if adding and option == b"*":
            break
        if option in (b"MAXLEN", b"MINID") and at < last:
            if max_len is not None or min_id is not None:
                raise ErrorReply(_TWO_TRIMS)
            at += 1
            approximate = args[at] == b"~" and at < last
            if approximate or (args[at] == b"=" and at < last):
                at += 1
            if option == b"MINID":
                min_id = parse_id(args[at])
            else:
                max_len = _not_negative(args[at], "MAXLEN")
        elif option == b"LIMIT" and at < last:
            at += 1
            limit = _not_negative(args[at], "LIMIT")
        elif adding and option == b"NOMKSTREAM":
            create = False
        elif adding:
            entry_id = parse_new_id(args[at])
            break
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    has_trim = max_len is not None or min_id is not None
    if limit and not has_trim:
        raise ErrorReply(_LIMIT_ALONE)
    if not adding and not has_trim:
        raise ErrorReply(_NO_TRIM)
    if limit is None:
        limit = engine.config.approximate_trim_limit if approximate else 0
    elif not approximate:
        raise ErrorReply(_LIMIT_EXACT)
    trim = Trim(max_len, min_id, approximate, limit) if has_trim else None
    return at, entry_id, trim, create


def _not_negative(raw: bytes, name: str) -> int:
    number = parse_int(raw)
    if number < 0:
        raise ErrorReply(f"ERR The {name} argument must be >= 0.")
    return number


def _record_trim(db: Database, key: bytes, stream: Stream) -> None:
    """Records the resulting length, so that a replay does not depend on node boundaries."""
    db.engine.record(db, b"XTRIM", key, b"MAXLEN", b"=", b"%d" % stream.length)


@command("XTRIM", arity=-4, flags=Flag.WRITE, keys=(1, 1, 1))
def xtrim(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    _, _, trim, _ = _parse(engine, args, adding=False)
    assert trim is not None
    stream = db.find_as(key, Stream)
    if stream is None:
        return 0
    deleted = trim.apply(stream)
    if deleted:
        engine.notify(db, STREAM, b"xtrim", key)
        modified_without_wake(db, key, deleted)
        _record_trim(db, key, stream)
    return deleted


@command("XDEL", arity=-3, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def xdel(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    stream = db.find_as(key, Stream)
    if stream is None:
        return 0
    ids = [parse_id(raw) for raw in args[2:]]
    deleted = sum(map(stream.delete, ids))
    if deleted:
        modified_without_wake(db, key, deleted)
        engine.notify(db, STREAM, b"xdel", key)
        engine.record(db, b"XDEL", *args[1:])
    return deleted


@command("XSETID", arity=-3, flags=Flag.WRITE | Flag.DENY_OOM | Flag.FAST, keys=(1, 1, 1))
def xsetid(session: Session, args: Sequence[bytes]) -> Reply:
    engine, db, key = session.engine, session.db, args[1]
    last_id = parse_id(args[2])
    added: int | None = None
    max_deleted_id = 0
    at = 3
    while at < len(args):
        option, has_value = args[at].upper(), at + 1 < len(args)
        if option == b"ENTRIESADDED" and has_value:
            added = parse_int(args[at + 1])
            if added < 0:
                raise ErrorReply("ERR entries_added must be positive")
        elif option == b"MAXDELETEDID" and has_value:
            max_deleted_id = parse_id(args[at + 1])
            if last_id < max_deleted_id:
                raise ErrorReply("ERR The ID specified in XSETID is smaller than the provided max_deleted_entry_id")
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 2
    stream = db.find_as(key, Stream)
    if stream is None:
        raise ErrorReply("ERR no such key")
    if stream.length:
        if last_id < stream.top_id:
            raise ErrorReply("ERR The ID specified in XSETID is smaller than the target stream top item")
        if added is not None and stream.length > added:
            raise ErrorReply("ERR The entries_added specified in XSETID is smaller than the target stream length")
    stream.last_id = last_id
    if added is not None:
        stream.entries_added = added
    if max_deleted_id:
        stream.max_deleted_id = max_deleted_id
    modified_without_watch(db, key)
    engine.notify(db, STREAM, b"xsetid", key)
    engine.record(db, *args)
    return OK
