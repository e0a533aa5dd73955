"""Twin of lease_take.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    member, seen, ttl_ms = argv
    current = call(b"GET", keys[0]) or b""
    if current != seen:
        return [0, current]
    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    last = int(current.split(b" ", 1)[0]) if current else 0
    number = b"%d" % max(now, last + 1)
    call(b"SET", keys[0], number + b" " + member, b"PX", ttl_ms)
    return [1, number]
