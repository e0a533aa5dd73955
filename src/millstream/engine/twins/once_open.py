"""The twin of once_open.lua: shuts the stream for the rest of the transaction where the marker refuses."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.engine.twins.once import Once
from millstream.wire.replies import Reply

SHUT = b"18446744073709551615-18446744073709551615"


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    once, gate = Once(call, keys, argv), keys[2]
    refusal = once.check() or once.exhausted()
    call(b"DEL", gate)
    if refusal is None:
        call(b"XADD", gate, b"1-1", b"open", b"%d" % once.length)
        return [b"OK"]
    if once.kind == b"stream":
        call(b"XADD", gate, b"1-1", b"shut", once.greatest)
        call(b"XSETID", once.stream, SHUT)
    elif once.kind == b"none":
        call(b"XADD", gate, b"1-1", b"shut", b"none")
        call(b"XADD", once.stream, b"MAXLEN", b"0", SHUT, b"shut", b"")
    return refusal
