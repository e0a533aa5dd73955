"""Twin of later_add.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    seconds, micros = call(b"TIME")
    at = b"%d" % (int(seconds) * 1000 + int(micros) // 1000 + int(argv[0]))
    added = 0
    for token, message in zip(argv[1::2], argv[2::2], strict=True):
        if call(b"ZSCORE", keys[1], token) is None:
            added += call(b"ZADD", keys[0], b"NX", at, message)
    return added
