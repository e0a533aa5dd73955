"""The twins of the scripts in this folder: each function does what the script of its name does."""

from __future__ import annotations

from millstream.broker.steps.twins import clock_ms
from millstream.engine import Call
from millstream.wire import ErrorReply, Reply


def sweep(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, abandoned, cursor, scan) = keys, argv[:5]
    room, left = int(argv[5]), int(argv[6])
    owner = (argv[7],) if argv[7] else ()
    page = call(b"XPENDING", key, group, cursor, b"+", scan, *owner)
    leave = set(argv[8:])
    taken: list[Reply] = []
    gone: list[bytes] = []
    for entry_id, _, idle, times in page:
        if idle >= int(abandoned) and entry_id not in leave and call(b"ZSCORE", due, entry_id) is None:
            if len(taken) >= room or left <= 0:
                return [entry_id, taken, gone]
            claimed = call(b"XCLAIM", key, group, me, b"0", entry_id, b"RETRYCOUNT", b"%d" % max(1, times))
            if claimed:
                words = claimed[0][1]
                taken.append([entry_id, words, times])
                left -= sum(map(len, words))
            else:
                gone.append(entry_id)
    if len(page) < int(scan):
        return [b"0-0", taken, gone]
    return [b"(" + page[-1][0], taken, gone]


def due_take(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, limit, room) = keys, argv
    left = int(room)
    now = clock_ms(call)
    taken: list[Reply] = []
    gone: list[bytes] = []
    for entry_id in call(b"ZRANGEBYSCORE", due, b"-inf", b"%d" % now, b"LIMIT", b"0", limit):
        if left <= 0:
            break
        held = call(b"XPENDING", key, group, entry_id, entry_id, b"1")
        call(b"ZREM", due, entry_id)
        if not held:
            continue
        count = held[0][3] + 1
        claimed = call(b"XCLAIM", key, group, me, b"0", entry_id, b"RETRYCOUNT", b"%d" % count)
        if claimed:
            words = claimed[0][1]
            taken.append([entry_id, words, count])
            left -= sum(map(len, words))
        else:
            gone.append(entry_id)
    following = call(b"ZRANGE", due, b"0", b"0", b"WITHSCORES")
    return [taken, max(0, int(float(following[1])) - now) if following else -1, gone]


def needs_visit(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    group, abandoned, scan = argv
    now = clock_ms(call)

    def wait_for(key: bytes) -> int:
        try:
            first = call(b"ZRANGE", key, b"0", b"0", b"WITHSCORES")
        except ErrorReply:
            return -1
        return max(0, int(float(first[1])) - now) if first else -1

    found: list[Reply] = []
    for number, key in enumerate(keys[::3]):
        sweep = 0
        try:
            count = call(b"XPENDING", key, group)[0]
        except ErrorReply:
            count = 0
        if count and (count > int(scan) or call(b"XPENDING", key, group, b"IDLE", abandoned, b"-", b"+", b"1")):
            sweep = 1
        due, later = wait_for(keys[3 * number + 1]), wait_for(keys[3 * number + 2])
        if sweep or due >= 0 or later >= 0:
            found.append([number, sweep, due, later])
    return found
