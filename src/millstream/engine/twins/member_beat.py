"""Twin of member_beat.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    member, lease_ms, owned, capacity, ttl_ms, forget_ms = argv
    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    if lease_ms == b"0":
        call(b"HDEL", keys[0], member)
    else:
        call(b"HSET", keys[0], member, b"%d %b %b" % (now + int(lease_ms), owned, capacity))
        call(b"PEXPIRE", keys[0], ttl_ms)
    rows = call(b"HGETALL", keys[0])
    answer = [now, call(b"XLEN", keys[1])]
    for name, row in zip(rows[::2], rows[1::2], strict=True):
        if int(row.split(b" ", 1)[0]) + int(forget_ms) < now:
            call(b"HDEL", keys[0], name)
        else:
            answer += [name, row]
    return answer
