"""The twin of once_close.lua: moves the marker, or makes the stream what it was before once_open shut it."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Once
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once = Once(call, keys, argv)
    noted = call(b"XRANGE", keys[2], b"-", b"+")
    what, value = noted[0][1] if noted else (b"", b"")
    if what == b"open" and once.length - int(value) == int(argv[6]):
        once.move(int(argv[6]), once.greatest)
        return [b"OK", argv[6], once.greatest]
    if what == b"shut" and value == b"none":
        call(b"DEL", once.stream)
        return [b"SHUT"]
    if what == b"shut":
        call(b"XSETID", once.stream, value)
        return [b"SHUT"]
    return ErrorReply("ERR not all rows of this transaction were added, and its marker was not moved")
