"""Twin of later_add.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.seen import Seen
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    later, done = keys[:2]
    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    at = b"%d" % (now + int(argv[1]))
    messages = zip(argv[2::2], argv[3::2], strict=True)
    added = 0
    if int(argv[0]):
        seen = Seen(call, keys, argv[0], now)
        for token, message in messages:
            if seen.is_new(token):
                added += call(b"ZADD", later, at, message)
        seen.keep()
        return added
    for token, message in messages:
        when = call(b"ZSCORE", done, token)
        if when is not None:
            call(b"ZREM", done, token)
            call(b"ZADD", done, b"%d" % int(when), token)
            continue
        when = call(b"ZSCORE", later, message)
        if when is not None:
            call(b"ZREM", later, message)
        else:
            added += 1
        call(b"ZADD", later, at if when is None else b"%d" % int(when), message)
    return added
