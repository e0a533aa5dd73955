"""The emulations of the scripts in this folder."""

from __future__ import annotations

from millstream.broker.scripts.append_unique.emulation import Seen
from millstream.broker.scripts.emulations import clock_ms
from millstream.engine.commands.transactions import Call
from millstream.wire import Reply


def later_add(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    later, done = keys[:2]
    now = clock_ms(call)
    at = b"%d" % (now + int(argv[1]))
    messages = zip(argv[2::2], argv[3::2], strict=True)
    added = 0
    if int(argv[0]):
        seen_ids = Seen(call, keys, argv[0], now)
        for token, message in messages:
            if seen_ids.is_new(token):
                added += call(b"ZADD", later, at, message)
        seen_ids.keep()
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


def later_move(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (stream, later, done), (limit, remember) = keys, argv
    now = clock_ms(call)
    stamp = b"%d" % now
    ids: list[bytes] = []
    due = call(b"ZRANGEBYSCORE", later, b"-inf", stamp, b"LIMIT", b"0", limit)
    for message in due:
        parts: list[bytes] = []
        at = 0
        while at < len(message):
            colon = message.index(b":", at)
            size = int(message[at:colon])
            parts.append(message[colon + 1 : colon + 1 + size])
            at = colon + 1 + size
        ids.append(call(b"XADD", stream, b"*", *parts[1:]))
        call(b"ZREM", later, message)
        call(b"ZADD", done, stamp, parts[0])
    if due:
        call(b"ZREMRANGEBYSCORE", done, b"-inf", b"%d" % (now - int(remember)))
        call(b"PEXPIRE", done, remember)
    following = call(b"ZRANGE", later, b"0", b"0", b"WITHSCORES")
    return [ids, max(0, int(float(following[1])) - now) if following else -1]
