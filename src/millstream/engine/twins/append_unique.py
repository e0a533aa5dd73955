"""The twin of append_unique.lua: appends entries whose event ids were not seen in this window or the one before."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.seen import Seen
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]

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
    seen = Seen(call, keys, argv[0], now)

    words = int(argv[1])
    at = 2 + words
    answer: list[bytes | None] = []
    while at < len(argv):
        event, count = argv[at], int(argv[at + 1])
        if seen.is_new(event):
            answer.append(call(b"XADD", stream, b"*", *argv[at + 2 : at + 2 + count]))
        else:
            answer.append(None)
        at += count + 2
    seen.keep()
    if words:
        call(b"XTRIM", stream, *argv[2 : 2 + words])
    return answer
