"""Twin of later_move.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (stream, later, done), (limit, remember) = keys, argv
    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    stamp = b"%d" % now
    ids: list[bytes] = []
    due = call(b"ZRANGEBYSCORE", later, b"-inf", stamp, b"LIMIT", b"0", limit)
    for message in due:
        words: list[bytes] = []
        at = 0
        while at < len(message):
            colon = message.index(b":", at)
            size = int(message[at:colon])
            words.append(message[colon + 1 : colon + 1 + size])
            at = colon + 1 + size
        ids.append(call(b"XADD", stream, b"*", *words[1:]))
        call(b"ZREM", later, message)
        call(b"ZADD", done, stamp, words[0])
    if due:
        call(b"ZREMRANGEBYSCORE", done, b"-inf", b"%d" % (now - int(remember)))
        call(b"PEXPIRE", done, remember)
    following = call(b"ZRANGE", later, b"0", b"0", b"WITHSCORES")
    return [ids, max(0, int(float(following[1])) - now) if following else -1]
