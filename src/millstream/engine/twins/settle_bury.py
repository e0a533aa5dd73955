"""Twin of settle_bury.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, dlq), (group, me, times, entry_id) = keys, argv[:4]
    held = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
    if not held or held[0][3] != int(times):
        return None
    letter = call(b"XADD", dlq, b"*", *argv[4:])
    call(b"XACK", key, group, entry_id)
    return letter
