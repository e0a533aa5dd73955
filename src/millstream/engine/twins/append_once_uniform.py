"""Twin of append_once_uniform.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Marker, marker_of
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    marker = marker_of(call, keys, argv)
    if not isinstance(marker, Marker):
        return marker
    marker.check_exhausted()

    stream, last = keys[0], marker.last
    width = int(argv[6])
    first = 7 + width
    words = [word for name in argv[7:first] for word in (name, b"")]
    for at in range(first, len(argv), width):
        words[1::2] = argv[at : at + width]
        last = call(b"XADD", stream, b"*", *words)
    count = (len(argv) - first) // width
    marker.move(count, last)
    return [b"OK", b"%d" % count, last]
