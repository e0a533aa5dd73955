"""The twin of move_consumer.lua: deletes a consumer, its pending entries going to an heir."""

from __future__ import annotations

from millstream.engine.scripts import Call
from millstream.wire.replies import Reply


def run(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    group, consumer, heir = argv
    page = call(b"XPENDING", stream, group, b"-", b"+", b"1000", consumer)
    if page and not heir:
        owners = call(b"XPENDING", stream, group)[3]
        return [b"PENDING", sum(int(count) for owner, count in owners if owner == consumer)]
    moved = 0
    while page:
        for entry_id, _, idle, times in page:
            claimed = call(
                *(b"XCLAIM", stream, group, heir, b"0", entry_id),
                *(b"IDLE", b"%d" % idle, b"RETRYCOUNT", b"%d" % times, b"JUSTID"),
            )
            moved += len(claimed)
        page = call(b"XPENDING", stream, group, b"-", b"+", b"1000", consumer)
    call(b"XGROUP", b"DELCONSUMER", stream, group, consumer)
    return moved
