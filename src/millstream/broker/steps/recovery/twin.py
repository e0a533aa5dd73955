"""The twins of the scripts in this folder: each function does what the script of its name does."""

from __future__ import annotations

from millstream.broker.steps.twins import clock_ms
from millstream.engine import Call
from millstream.wire import ErrorReply, Reply


def sweep(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, abandoned, cursor, scan) = keys, argv[:5]
    room, left = int(argv[5]), int(argv[6])
    owner = (argv[7],) if argv[7] else ()
    leave = set(argv[8:])
    some_wait = bool(call(b"ZRANGE", due, b"0", b"0"))
    taken: list[Reply] = []
    gone: list[bytes] = []
    together: list[bytes] = []
    count, most, largest = 0, 1, 1

    def claim() -> None:
        nonlocal left, most, largest
        if not together:
            return
        claimed = dict(call(b"XCLAIM", key, group, me, b"0", *together, b"RETRYCOUNT", b"%d" % max(1, count)))
        for one in together:
            if (words := claimed.get(one)) is None:
                gone.append(one)
                continue
            size = sum(map(len, words))
            left -= size
            largest = max(largest, size)
            taken.append([one, words, count])
        together.clear()
        most = max(1, min(50, left // largest))

    looked = 0
    while looked < int(scan):
        wanted = min(100, int(scan) - looked)
        page = call(b"XPENDING", key, group, cursor, b"+", b"%d" % wanted, *owner)
        for entry_id, _, idle, times in page:
            if idle >= int(abandoned) and entry_id not in leave and not (some_wait and _waits(call, due, entry_id)):
                if times != count or len(together) >= most or len(taken) + len(together) >= room:
                    claim()
                if len(taken) >= room or left <= 0:
                    return [entry_id, taken, gone]
                together.append(entry_id)
                count = times
        if len(page) < wanted:
            claim()
            return [b"0-0", taken, gone]
        looked += len(page)
        cursor = b"(" + page[-1][0]
    claim()
    return [cursor, taken, gone]


def _waits(call: Call, due: bytes, entry_id: bytes) -> bool:
    return call(b"ZSCORE", due, entry_id) is not None


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
