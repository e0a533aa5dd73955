"""Twin of settle_outputs.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, group, me = keys[0], argv[0], argv[1]
    for target in keys[1:]:
        if call(b"TYPE", target) not in (b"stream", b"none"):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    answer: list[list[bytes] | None] = []
    at = 2
    while at < len(argv):
        entry_id, times, outputs = argv[at], int(argv[at + 1]), int(argv[at + 2])
        at += 3
        held = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
        mine = bool(held) and held[0][3] == times
        ids: list[bytes] = []
        for _ in range(outputs):
            target, words = keys[int(argv[at]) - 1], int(argv[at + 1])
            if mine:
                ids.append(call(b"XADD", target, b"*", *argv[at + 2 : at + 2 + words]))
            at += 2 + words
        if mine:
            call(b"XACK", key, group, entry_id)
            answer.append(ids)
        else:
            answer.append(None)
    return answer
