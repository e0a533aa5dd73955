"""The twin of append_unique.lua: appends entries whose event ids were not seen in this window or the one before."""

from __future__ import annotations

import re

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream, seen, seen_before, began = keys
    window = int(argv[0])

    # What could fail half-way is looked at before the first write: a script does not roll back.
    kind = call(b"TYPE", stream)
    if kind not in (b"none", b"stream"):
        raise ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    if kind == b"stream":
        facts = call(b"XINFO", b"STREAM", stream)
        if dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"].startswith(b"18446744073709551615-"):
            raise ErrorReply("ERR The stream has exhausted the last possible ID, unable to add more items")

    seconds, micros = call(b"TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    known = re.fullmatch(rb"(\d+) (\d+)", call(b"GET", began) or b"")
    since, promised = (int(known[1]), int(known[2])) if known else (0, 0)
    longer = known is not None and window > promised
    window = max(window, promised)
    age = None if known is None else now - since
    if age is None or age >= window:
        if age is not None and age < 2 * window and call(b"EXISTS", seen) == 1:
            call(b"RENAME", seen, seen_before)
            call(b"PEXPIRE", seen_before, b"%d" % window)
        else:
            call(b"DEL", seen, seen_before)
        call(b"SET", began, b"%d %d" % (now, window), b"PX", b"%d" % (2 * window))
    elif longer:
        call(b"SET", began, b"%d %d" % (since, window), b"PX", b"%d" % (2 * window))

    words = int(argv[1])
    at = 2 + words
    answer: list[bytes | None] = []
    while at < len(argv):
        event, count = argv[at], int(argv[at + 1])
        if call(b"SISMEMBER", seen_before, event) == 0 and call(b"SADD", seen, event) == 1:
            answer.append(call(b"XADD", stream, b"*", *argv[at + 2 : at + 2 + count]))
        else:
            answer.append(None)
        at += count + 2
    call(b"PEXPIRE", seen, b"%d" % (2 * window))
    if words:
        call(b"XTRIM", stream, *argv[2 : 2 + words])
    return answer
