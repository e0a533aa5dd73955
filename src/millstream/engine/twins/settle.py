"""Twin of settle.lua."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, delivered, verb, number), ids = keys, argv[:5], argv[5:]
    times = int(delivered)
    page = len(ids) + 64
    held = call(b"XPENDING", key, group, ids[0], ids[-1], b"%d" % page, me)
    mine = {row[0] for row in held if row[3] == times}
    kept: list[bytes] = []
    refused: list[bytes] = []
    gone: list[bytes] = []
    for entry_id in ids:
        is_mine = entry_id in mine
        if not is_mine and len(held) == page:
            one = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
            is_mine = bool(one) and one[0][3] == times
        (kept if is_mine else refused).append(entry_id)
    known = 1
    if refused:
        known = int(any(row[1] == me for row in call(b"XINFO", b"CONSUMERS", key, group)))
    if not kept:
        return [refused, known, gone]
    if verb == b"ack":
        call(b"XACK", key, group, *kept)
    else:
        options: tuple[bytes, ...] = ()
        if verb == b"start":
            options = (b"RETRYCOUNT", b"%d" % (times + 1))
        elif verb == b"back":
            options = (b"RETRYCOUNT", number, b"TIME", b"1")
        claimed = call(b"XCLAIM", key, group, me, b"0", *kept, *options, b"JUSTID")
        here = set(claimed)
        gone = [entry_id for entry_id in kept if entry_id not in here]
        kept = claimed
    if verb == b"delay":
        seconds, micros = call(b"TIME")
        at = b"%d" % (int(seconds) * 1000 + int(micros) // 1000 + int(number))
        for entry_id in kept:
            call(b"ZADD", due, at, entry_id)
    return [refused, known, gone]
