"""Twin of lock_release.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    return call(b"DEL", keys[0]) if call(b"GET", keys[0]) == argv[0] else 0
