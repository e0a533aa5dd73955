"""Twin of append_once_at.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Marker, marker_of
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    marker = marker_of(call, keys, argv)
    if not isinstance(marker, Marker):
        return marker

    greatest = marker.greatest
    at = 6
    while at < len(argv):
        if not _pair(greatest) < _pair(argv[at + 1]):
            return [b"ID", argv[at + 1], greatest]
        greatest = argv[at + 1]
        at += int(argv[at]) + 2

    last = marker.last
    at = 6
    answer = [b"OK"]
    while at < len(argv):
        count = int(argv[at])
        last = call(b"XADD", keys[0], *argv[at + 1 : at + 2 + count])
        answer.append(last)
        at += count + 2
    marker.move(len(answer) - 1, last)
    return answer


def _pair(text: bytes) -> tuple[int, int]:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)
