"""The emulations of the scripts in this folder."""

from __future__ import annotations

from millstream.broker.operations.conversion import mapping
from millstream.broker.scripts.emulations import id_order
from millstream.engine.commands.transactions import Call
from millstream.wire import Reply


def advance_group(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    if call(b"EXISTS", keys[0]) == 0:
        return -1
    group, id_text, entries_read = argv
    verb = b"CREATE"
    for flat in call(b"XINFO", b"GROUPS", keys[0]):
        info = mapping(flat)
        if info[b"name"] == group:
            if info[b"consumers"] > 0 or info[b"pending"] > 0:
                return -2
            uncounted = info[b"entries-read"] is None
            adds_count = info[b"last-delivered-id"] == id_text and uncounted and entries_read != b""
            if not adds_count and not id_order(info[b"last-delivered-id"]) < id_order(id_text):
                return 0
            verb = b"SETID"
    if entries_read == b"":
        call(b"XGROUP", verb, keys[0], group, id_text)
    else:
        call(b"XGROUP", verb, keys[0], group, id_text, b"ENTRIESREAD", entries_read)
    return 1


def restore_group(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due, made), (group, point, ttl_ms) = keys, argv
    last: bytes | None = None
    if call(b"EXISTS", key) == 1:
        for row in call(b"XINFO", b"GROUPS", key):
            info = mapping(row)
            if info[b"name"] == group:
                last = info[b"last-delivered-id"]
    oldest: bytes | None = None
    for entry_id in call(b"ZRANGE", due, b"0", b"-1"):
        if last is None or not call(b"XPENDING", key, group, entry_id, entry_id, b"1"):
            call(b"ZREM", due, entry_id)
            if oldest is None or id_order(entry_id) < id_order(oldest):
                oldest = entry_id
    if oldest is not None:
        earlier = call(b"XREVRANGE", key, b"(" + oldest, b"-", b"COUNT", b"1")
        start: bytes = earlier[0][0] if earlier else b"0-0"
        if id_order(start) < id_order(point):
            point = start
    if last is None:
        call(b"XGROUP", b"CREATE", key, group, point, b"MKSTREAM")
        call(b"SET", made, b"1", b"PX", ttl_ms)
        return b"made"
    if id_order(point) < id_order(last):
        call(b"XGROUP", b"SETID", key, group, point)
        return b"moved"
    return b"kept"


def move_consumer(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    group, consumer, new_owner = argv
    page = call(b"XPENDING", stream, group, b"-", b"+", b"1000", consumer)
    if page and not new_owner:
        owners = call(b"XPENDING", stream, group)[3]
        return [b"PENDING", sum(int(count) for owner, count in owners if owner == consumer)]
    moved = 0
    while page:
        for entry_id, _, idle, times in page:
            claimed = call(
                b"XCLAIM",
                stream,
                group,
                new_owner,
                b"0",
                entry_id,
                b"IDLE",
                b"%d" % idle,
                b"RETRYCOUNT",
                b"%d" % times,
                b"JUSTID",
            )
            moved += len(claimed)
        page = call(b"XPENDING", stream, group, b"-", b"+", b"1000", consumer)
    call(b"XGROUP", b"DELCONSUMER", stream, group, consumer)
    return moved
