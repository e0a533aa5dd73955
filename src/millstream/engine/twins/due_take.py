"""Twin of due_take.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, limit, room) = keys, argv
    left = int(room)
    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
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
