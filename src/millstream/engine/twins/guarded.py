"""Twin of guarded.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    if call(b"GET", keys[0]) != argv[0]:
        return ErrorReply("STALEOWNER the owner record is another")
    if argv[1] not in (b"XADD", b"XACK"):
        return ErrorReply("ERR guarded takes XADD and XACK")
    return call(argv[1], keys[1], *argv[2:])
