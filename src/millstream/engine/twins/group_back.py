"""Twin of group_back.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def _numbers(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, point) = keys, argv
    last: bytes | None = None
    if call(b"EXISTS", key) == 1:
        for row in call(b"XINFO", b"GROUPS", key):
            facts = dict(zip(row[::2], row[1::2], strict=True))
            if facts[b"name"] == group:
                last = facts[b"last-delivered-id"]
    oldest: bytes | None = None
    for entry_id in call(b"ZRANGE", due, b"0", b"-1"):
        if last is None or not call(b"XPENDING", key, group, entry_id, entry_id, b"1"):
            call(b"ZREM", due, entry_id)
            if oldest is None or _numbers(entry_id) < _numbers(oldest):
                oldest = entry_id
    if oldest is not None:
        earlier = call(b"XREVRANGE", key, b"(" + oldest, b"-", b"COUNT", b"1")
        start: bytes = earlier[0][0] if earlier else b"0-0"
        if _numbers(start) < _numbers(point):
            point = start
    if last is None:
        call(b"XGROUP", b"CREATE", key, group, point, b"MKSTREAM")
        return b"made"
    if _numbers(point) < _numbers(last):
        call(b"XGROUP", b"SETID", key, group, point)
        return b"moved"
    return b"kept"
