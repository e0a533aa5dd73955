"""The emulations of the scripts in this folder."""

from __future__ import annotations

from millstream.broker.scripts.emulations import clock_ms
from millstream.engine.commands.transactions import Call
from millstream.wire import ErrorReply, Reply

MAX_COUNT = 2**53 - 1
"""As in the scripts: a greater delivery count, such as XNACK FATAL sets, is not exact in Lua."""


def sweep(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, min_idle, cursor, scan) = keys, argv[:5]
    room, bytes_left = int(argv[5]), int(argv[6])
    owner = (argv[7],) if argv[7] else ()
    leave = set(argv[8:])
    has_delayed = bool(call(b"ZRANGE", due, b"0", b"0"))
    taken: list[Reply] = []
    gone: list[bytes] = []
    batch: list[bytes] = []
    count, max_batch, largest = 0, 1, 1

    def claim() -> None:
        nonlocal bytes_left, max_batch, largest
        if not batch:
            return
        claimed = dict(call(b"XCLAIM", key, group, me, b"0", *batch, b"RETRYCOUNT", b"%d" % max(1, count)))
        for entry_id in batch:
            if (fields := claimed.get(entry_id)) is None:
                gone.append(entry_id)
                continue
            size = sum(map(len, fields))
            bytes_left -= size
            largest = max(largest, size)
            taken.append([entry_id, fields, count])
        batch.clear()
        max_batch = max(1, min(50, bytes_left // largest))

    examined = 0
    while examined < int(scan):
        page_size = min(100, int(scan) - examined)
        page = call(b"XPENDING", key, group, cursor, b"+", b"%d" % page_size, *owner)
        last, done = None, len(taken) + len(gone)
        for entry_id, _, idle, counted in page:
            times = min(counted, MAX_COUNT)
            released = idle < 0  # by XNACK: without an owner, first in the list, in any order of ids
            if not released:
                last = entry_id
            if (
                (released or idle >= int(min_idle))
                and entry_id not in leave
                and not (has_delayed and _is_delayed(call, due, entry_id))
            ):
                if times != count or len(batch) >= max_batch or len(taken) + len(batch) >= room:
                    claim()
                if len(taken) >= room or bytes_left <= 0:
                    return [cursor if released else entry_id, taken, gone]
                batch.append(entry_id)
                count = times
        if len(page) < page_size:
            claim()
            return [b"0-0", taken, gone]
        examined += len(page)
        if last is None:
            claim()
        if last is not None or len(taken) + len(gone) == done:
            cursor = b"(" + (last or page[-1][0])
    claim()
    return [cursor, taken, gone]


def _is_delayed(call: Call, due: bytes, entry_id: bytes) -> bool:
    return call(b"ZSCORE", due, entry_id) is not None


def due_take(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, limit, room) = keys, argv
    bytes_left = int(room)
    now = clock_ms(call)
    taken: list[Reply] = []
    gone: list[bytes] = []
    for entry_id in call(b"ZRANGEBYSCORE", due, b"-inf", b"%d" % now, b"LIMIT", b"0", limit):
        if bytes_left <= 0:
            break
        pending = call(b"XPENDING", key, group, entry_id, entry_id, b"1")
        call(b"ZREM", due, entry_id)
        if not pending:
            continue
        count = min(pending[0][3], MAX_COUNT) + 1
        claimed = call(b"XCLAIM", key, group, me, b"0", entry_id, b"RETRYCOUNT", b"%d" % count)
        if claimed:
            fields = claimed[0][1]
            taken.append([entry_id, fields, count])
            bytes_left -= sum(map(len, fields))
        else:
            gone.append(entry_id)
    following = call(b"ZRANGE", due, b"0", b"0", b"WITHSCORES")
    return [taken, max(0, int(float(following[1])) - now) if following else -1, gone]


def needs_visit(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    group, min_idle, scan = argv
    now = clock_ms(call)

    def wait_for(key: bytes) -> int:
        try:
            first = call(b"ZRANGE", key, b"0", b"0", b"WITHSCORES")
        except ErrorReply:
            return -1
        return max(0, int(float(first[1])) - now) if first else -1

    visits: list[Reply] = []
    for number, key in enumerate(keys[::3]):
        sweep = 0
        try:
            count = call(b"XPENDING", key, group)[0]
        except ErrorReply:
            count = 0
        if count and (count > int(scan) or call(b"XPENDING", key, group, b"IDLE", min_idle, b"-", b"+", b"1")):
            sweep = 1
        elif count and any(row[2] < 0 for row in call(b"XPENDING", key, group, b"-", b"+", b"1")):
            sweep = 1  # released by XNACK: first in the list
        due, later = wait_for(keys[3 * number + 1]), wait_for(keys[3 * number + 2])
        if sweep or due >= 0 or later >= 0:
            visits.append([number, sweep, due, later])
    return visits


def release(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key,), (group, consumer, cursor, size) = keys, argv
    page = call(b"XPENDING", key, group, cursor, b"+", size, consumer)
    if not page:
        return [b"0-0", 0]
    ids = [row[0] for row in page]
    released = call(b"XCLAIM", key, group, consumer, b"0", *ids, b"TIME", b"1", b"JUSTID")
    if len(page) < int(size):
        return [b"0-0", len(released)]
    return [b"(" + ids[-1], len(released)]
