"""Twin of group_back.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def _numbers(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key,), (group, point) = keys, argv
    last: bytes | None = None
    if call(b"EXISTS", key) == 1:
        for row in call(b"XINFO", b"GROUPS", key):
            facts = dict(zip(row[::2], row[1::2], strict=True))
            if facts[b"name"] == group:
                last = facts[b"last-delivered-id"]
    if last is None:
        call(b"XGROUP", b"CREATE", key, group, point, b"MKSTREAM")
        return b"made"
    if _numbers(point) < _numbers(last):
        call(b"XGROUP", b"SETID", key, group, point)
        return b"moved"
    return b"kept"
