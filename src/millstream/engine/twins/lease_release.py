"""Twin of lease_release.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    record, ttl_ms = argv
    if call(b"GET", keys[0]) != record:
        return 0
    call(b"SET", keys[0], record.split(b" ", 1)[0] + b" ", b"PX", ttl_ms)
    return 1
