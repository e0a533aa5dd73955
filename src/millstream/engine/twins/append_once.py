"""The twin of append_once.lua: rows and the writer's marker in one step, if the marker is where it should be."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Once
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Once(call, keys, argv)
    if refusal := once.check() or once.exhausted():
        return once.refused(refusal)

    stream, last = keys[0], once.last
    words = int(argv[6])
    at = 7 + words
    answer = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", stream, b"*", *argv[at + 1 : at + 1 + count])
        answer.append(last)
        at += count + 1
    once.move(len(answer) - 1, last)
    if words:
        call(b"XTRIM", stream, *argv[7 : 7 + words])
    return answer
