"""Twin of advance_group.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    if call(b"EXISTS", keys[0]) == 0:
        return -1
    group, id_text, entries_read = argv
    verb = b"CREATE"
    for flat in call(b"XINFO", b"GROUPS", keys[0]):
        info = dict(zip(flat[::2], flat[1::2], strict=True))
        if info[b"name"] == group:
            told = info[b"entries-read"]
            teaches = info[b"last-delivered-id"] == id_text and told is None and entries_read != b""
            if not teaches and not _pair(info[b"last-delivered-id"]) < _pair(id_text):
                return 0
            verb = b"SETID"
    if entries_read == b"":
        call(b"XGROUP", verb, keys[0], group, id_text)
    else:
        call(b"XGROUP", verb, keys[0], group, id_text, b"ENTRIESREAD", entries_read)
    return 1


def _pair(text: bytes) -> tuple[int, int]:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)
