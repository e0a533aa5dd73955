"""The twin of trim_safely.lua: trims, but nothing that a group still needs."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    max_len, min_id = argv
    if call(b"TYPE", stream) == b"none":
        return 0
    safe: bytes | None = None  # ids from here on are needed; None: there is no group
    for facts in call(b"XINFO", b"GROUPS", stream):
        group = dict(zip(facts[::2], facts[1::2], strict=True))
        needed = after(group[b"last-delivered-id"])
        if group[b"pending"] > 0:
            oldest = call(b"XPENDING", stream, group[b"name"])[1]
            if before(oldest, needed):
                needed = oldest
        if safe is None or before(needed, safe):
            safe = needed

    gone = 0
    if min_id:
        bound = min_id if safe is None or before(min_id, safe) else safe
        gone = call(b"XTRIM", stream, b"MINID", b"=", bound)
    if max_len:
        excess = call(b"XLEN", stream) - int(max_len)
        if excess > 0 and safe is None:
            gone += call(b"XTRIM", stream, b"MAXLEN", b"=", max_len)
        elif excess > 0 and safe is not None:
            # Whole nodes first, which costs little; LIMIT keeps it from taking more than the excess.
            whole = call(b"XTRIM", stream, b"MINID", b"~", safe, b"LIMIT", b"%d" % excess)
            left = excess - whole
            gone += whole
            if left > 0:
                first = call(b"XRANGE", stream, b"-", b"(" + safe, b"COUNT", b"%d" % (left + 1))
                bound = first[left][0] if len(first) > left else safe
                gone += call(b"XTRIM", stream, b"MINID", b"=", bound)
    return gone


def before(left: bytes, right: bytes) -> bool:
    return _number(left) < _number(right)


def _number(entry_id: bytes) -> tuple[int, int]:
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def after(entry_id: bytes) -> bytes:
    ms, _, seq = entry_id.partition(b"-")
    if len(seq) > 15:
        return entry_id  # as in the script, whose numbers end here: keep this one entry too
    return b"%b-%d" % (ms, int(seq) + 1)
