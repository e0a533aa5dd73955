"""Stream commands on pending entries: XPENDING, XCLAIM, XAUTOCLAIM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millstream.engine.effects import claims
from millstream.engine.numbers import INT64_MAX, SYNTAX_ERROR, parse_int, parse_range
from millstream.engine.registry import Flag, command
from millstream.engine.session import Session
from millstream.engine.stream import Consumer, Group, Stream, reading
from millstream.engine.stream.group import PendingInfo
from millstream.engine.stream.ids import format_id, parse_end, parse_id, parse_start, read_id
from millstream.engine.stream.reading import consumer_of, group_of, modified_without_watch, record_position, to_text
from millstream.wire import NIL_ARRAY, ErrorReply, Reply

SCANNED_PER_CLAIM: Final = 10
"""XAUTOCLAIM scans at most this many pending entries per entry of COUNT, as in Redis."""
MAX_CLAIM_COUNT: Final = INT64_MAX // 16
MAX_ALLOCATED_CLAIMS: Final = 1 << 36
"""For a higher COUNT, Redis fails to allocate the array of deleted ids."""


@command("XPENDING", arity=-3, flags=Flag.READONLY, keys=(1, 1, 1))
def xpending(session: Session, args: Sequence[bytes]) -> Reply:
    if len(args) == 3:
        return _summary(group_of(session, args[1], args[2])[1])
    if not 6 <= len(args) <= 9:
        raise ErrorReply(SYNTAX_ERROR)
    at, min_idle = 3, 0
    if args[3].upper() == b"IDLE":
        min_idle = parse_int(args[4])
        if len(args) < 8:
            raise ErrorReply(SYNTAX_ERROR)
        at = 5
    count = max(parse_int(args[at + 2]), 0)
    first, last = parse_start(args[at]), parse_end(args[at + 1])
    _, group = group_of(session, args[1], args[2])
    pending = group.pending
    if at + 3 < len(args):
        consumer = group.consumers.get(args[at + 3])
        if consumer is None:
            return []
        pending = consumer.pending
    now_ms = session.engine.now_ms
    rows: list[Reply] = []
    if count:
        for entry_id, (consumer_of_entry, time_ms, deliveries) in pending.items(first):
            if entry_id > last:
                break
            if min_idle and now_ms - time_ms < min_idle:
                continue
            rows.append([format_id(entry_id), consumer_of_entry.name, max(now_ms - time_ms, 0), deliveries])
            if len(rows) == count:
                break
    return rows


def _summary(group: Group) -> Reply:
    first, last = group.pending.first(), group.pending.last()
    if first is None or last is None:
        return [0, None, None, NIL_ARRAY]
    counts = [
        [consumer.name, b"%d" % len(consumer.pending)]
        for consumer in group.consumers_by_name()
        if len(consumer.pending)
    ]
    return [len(group.pending), format_id(first), format_id(last), counts]


@dataclass(slots=True)
class _ClaimOptions:
    ids: list[int]
    just_id: bool = False
    force: bool = False
    time_ms: int | None = None
    deliveries: int | None = None
    last_id: int = 0


def _parse_claim(args: Sequence[bytes], now_ms: int) -> _ClaimOptions:
    """Parses ids up to the first argument that is not an id, and then options."""
    options = _ClaimOptions([])
    at, end = 5, len(args)
    while at < end and (entry_id := read_id(args[at])) is not None:
        options.ids.append(entry_id)
        at += 1
    while at < end:
        option, has_value = args[at].upper(), at + 1 < end
        if option == b"FORCE":
            options.force = True
        elif option == b"JUSTID":
            options.just_id = True
        elif option in (b"IDLE", b"TIME", b"RETRYCOUNT") and has_value:
            at += 1
            number = parse_int(args[at], f"ERR Invalid {option.decode()} option argument for XCLAIM")
            if option == b"RETRYCOUNT":
                options.deliveries = number if number >= 0 else None
            else:
                options.time_ms = now_ms - number if option == b"IDLE" else number
        elif option == b"LASTID" and has_value:
            at += 1
            options.last_id = parse_id(args[at])
        else:
            raise ErrorReply(f"ERR Unrecognized XCLAIM option '{to_text(args[at])}'")
        at += 1
    if options.time_ms is None or not 0 <= options.time_ms <= now_ms:
        options.time_ms = now_ms
    return options


class _Claims:
    """The claims of one command: moves entries to a consumer, records the effects, and collects the reply."""

    def __init__(self, session: Session, key: bytes, stream: Stream, group: Group, name: bytes) -> None:
        self.db, self.engine = session.db, session.engine
        self.key, self.stream, self.group, self.name = key, stream, group, name
        self.consumer: Consumer | None = None
        """Created, or its seen-time updated, when it claims its first entry."""
        self.replies: list[Reply] = []

    def drop(self, entry_id: int) -> None:
        """Removes an entry that was deleted from the stream from the pending lists."""
        self.group.release(entry_id)
        modified_without_watch(self.db, self.key)
        if self.engine.recording:
            self.engine.record(self.db, b"XACK", self.key, self.group.name, format_id(entry_id))

    def claim(self, entry_id: int, time_ms: int, deliveries: int, *, just_id: bool) -> None:
        if self.consumer is None:
            self.consumer = consumer_of(self.db, self.key, self.group, self.name)
        info: PendingInfo = (self.consumer, time_ms, deliveries)
        self.group.assign(entry_id, info)
        self.replies.append(format_id(entry_id) if just_id else reading.entry_reply(self.stream, entry_id))
        modified_without_watch(self.db, self.key)
        if self.engine.recording:
            for args in claims(self.key, self.group.name, [entry_id], info):
                self.engine.record(self.db, *args)


@command("XCLAIM", arity=-6, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def xclaim(session: Session, args: Sequence[bytes]) -> Reply:
    key, db, now_ms = args[1], session.db, session.engine.now_ms
    stream, group = group_of(session, key, args[2])
    min_idle = max(parse_int(args[4], "ERR Invalid min-idle-time argument for XCLAIM"), 0)
    options = _parse_claim(args, now_ms)
    assert options.time_ms is not None
    moved = options.last_id > group.last_id
    if moved:
        group.last_id = options.last_id
    claims = _Claims(session, key, stream, group, args[3])
    for entry_id in options.ids:
        info = group.pending.get(entry_id)
        if not stream.has(entry_id):
            if info is not None:
                claims.drop(entry_id)
            continue
        if info is None:
            if not options.force:
                continue
            deliveries = 1
        else:
            if min_idle and now_ms - info[1] < min_idle:
                continue
            deliveries = info[2]
        if options.deliveries is not None:
            deliveries = options.deliveries
        elif not options.just_id:
            deliveries = min(deliveries + 1, INT64_MAX)
        claims.claim(entry_id, options.time_ms, deliveries, just_id=options.just_id)
    if moved:
        modified_without_watch(db, key)
        record_position(db, key, group)
    return claims.replies


@command("XAUTOCLAIM", arity=-6, flags=Flag.WRITE | Flag.FAST, keys=(1, 1, 1))
def xautoclaim(session: Session, args: Sequence[bytes]) -> Reply:
    key, now_ms = args[1], session.engine.now_ms
    min_idle = max(parse_int(args[4], "ERR Invalid min-idle-time argument for XAUTOCLAIM"), 0)
    start = parse_start(args[5])
    count, just_id = 100, False
    at = 6
    while at < len(args):
        option = args[at].upper()
        if option == b"COUNT" and at + 1 < len(args):
            at += 1
            count = parse_range(args[at], 1, MAX_CLAIM_COUNT, "ERR COUNT must be > 0")
        elif option == b"JUSTID":
            just_id = True
        else:
            raise ErrorReply(SYNTAX_ERROR)
        at += 1
    stream, group = group_of(session, key, args[2])
    if count > MAX_ALLOCATED_CLAIMS:
        raise ErrorReply("ERR Insufficient memory, failed allocating transient memory, COUNT too high.")
    claims = _Claims(session, key, stream, group, args[3])
    # One more than may be scanned, which is the cursor of the next call.
    page = group.pending.page(start, min(count * SCANNED_PER_CLAIM, len(group.pending)) + 1)
    deleted: list[Reply] = []
    scanned = 0
    for entry_id, (_, time_ms, deliveries) in page[: count * SCANNED_PER_CLAIM]:
        if len(deleted) + len(claims.replies) == count:
            break
        scanned += 1
        if not stream.has(entry_id):
            claims.drop(entry_id)
            deleted.append(format_id(entry_id))
        elif not min_idle or now_ms - time_ms >= min_idle:
            next_deliveries = deliveries if just_id else min(deliveries + 1, INT64_MAX)
            claims.claim(entry_id, now_ms, next_deliveries, just_id=just_id)
    cursor = page[scanned][0] if scanned < len(page) else 0
    return [format_id(cursor), claims.replies, deleted]
