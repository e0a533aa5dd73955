"""Twin of balancer_finish.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    group, member, entry_id = argv
    if not call(b"XPENDING", keys[0], group, entry_id, entry_id, b"1", member):
        return 0
    call(b"XACK", keys[0], group, entry_id)
    call(b"XDEL", keys[0], entry_id)
    return 1
