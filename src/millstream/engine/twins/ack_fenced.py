"""The twin of ack_fenced.lua: acknowledges only what the consumer owns at this moment."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    group, consumer, *ids = argv
    acked = 0
    for entry_id in ids:
        if call(b"XPENDING", stream, group, entry_id, entry_id, b"1", consumer):
            acked += call(b"XACK", stream, group, entry_id)
    return acked
