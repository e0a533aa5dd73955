"""Twin of write.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import ErrorReply, Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    if argv[0] not in (b"XADD", b"XACK"):
        return ErrorReply("ERR write takes XADD and XACK")
    return call(argv[0], keys[0], *argv[1:])
