"""Twin of append_once_at.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Once
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Once(call, keys, argv)
    if refusal := once.check():
        return once.refused(refusal)

    greatest = once.greatest
    at = 6
    while at < len(argv):
        if not _pair(greatest) < _pair(argv[at + 1]):
            return [b"ID", argv[at + 1], greatest]
        greatest = argv[at + 1]
        at += int(argv[at]) + 2

    last = once.last
    at = 6
    answer = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", keys[0], *argv[at + 1 : at + 2 + count])
        answer.append(last)
        at += count + 2
    once.move(len(answer) - 1, last)
    return answer


def _pair(text: bytes) -> tuple[int, int]:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)
