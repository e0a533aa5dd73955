"""The emulations of the scripts in this folder."""

from __future__ import annotations

from millstream.broker.scripts.emulations import clock_ms
from millstream.engine.commands.transactions import Call
from millstream.wire import ErrorReply, Reply


def settle(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, due), (group, me, delivered, verb, number), ids = keys, argv[:5], argv[5:]
    times = int(delivered)
    page = len(ids) + 64
    pending = call(b"XPENDING", key, group, ids[0], ids[-1], b"%d" % page, me)
    owned = {row[0] for row in pending if row[3] == times}
    accepted: list[bytes] = []
    refused: list[bytes] = []
    gone: list[bytes] = []
    for entry_id in ids:
        is_owned = entry_id in owned
        if not is_owned and len(pending) == page:
            row = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
            is_owned = bool(row) and row[0][3] == times
        (accepted if is_owned else refused).append(entry_id)
    known = 1
    if refused:
        known = int(any(row[1] == me for row in call(b"XINFO", b"CONSUMERS", key, group)))
    if not accepted:
        return [refused, known, gone]
    if verb == b"ack":
        call(b"XACK", key, group, *accepted)
    else:
        options: tuple[bytes, ...] = ()
        if verb == b"start":
            options = (b"RETRYCOUNT", b"%d" % (times + 1))
        elif verb == b"back":
            options = (b"RETRYCOUNT", number, b"TIME", b"1")
        claimed = call(b"XCLAIM", key, group, me, b"0", *accepted, *options, b"JUSTID")
        existing = set(claimed)
        gone = [entry_id for entry_id in accepted if entry_id not in existing]
        accepted = claimed
    if verb == b"delay":
        at = b"%d" % (clock_ms(call) + int(number))
        for entry_id in accepted:
            call(b"ZADD", due, at, entry_id)
    return [refused, known, gone]


def ack_streams(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    group, me, at = argv[0], argv[1], 2
    rejected: list[int] = []
    for index, key in enumerate(keys, 1):
        times, count = int(argv[at]), int(argv[at + 1])
        ids = argv[at + 2 : at + 2 + count]
        at += 2 + count
        try:
            pending = call(b"XPENDING", key, group, ids[0], ids[-1], b"%d" % (count + 64), me)
            if not {row[0] for row in pending if row[3] == times}.issuperset(ids):
                rejected.append(index)
            else:
                call(b"XACK", key, group, *ids)
        except ErrorReply:
            rejected.append(index)
    return rejected


def settle_dead_letter(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, dlq), (group, me, times, entry_id) = keys, argv[:4]
    pending = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
    if not pending or pending[0][3] != int(times):
        return None
    dead_letter_id = call(b"XADD", dlq, b"*", *argv[4:])
    call(b"XACK", key, group, entry_id)
    return dead_letter_id


def settle_outputs(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, group, me = keys[0], argv[0], argv[1]
    for target in keys[1:]:
        if call(b"TYPE", target) not in (b"stream", b"none"):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    reply: list[list[bytes] | None] = []
    at = 2
    while at < len(argv):
        entry_id, times, outputs = argv[at], int(argv[at + 1]), int(argv[at + 2])
        at += 3
        pending = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
        owned = bool(pending) and pending[0][3] == times
        ids: list[bytes] = []
        for _ in range(outputs):
            target, size = keys[int(argv[at]) - 1], int(argv[at + 1])
            if owned:
                ids.append(call(b"XADD", target, b"*", *argv[at + 2 : at + 2 + size]))
            at += 2 + size
        if owned:
            call(b"XACK", key, group, entry_id)
            reply.append(ids)
        else:
            reply.append(None)
    return reply


def ack_fenced(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    group, consumer, *ids = argv
    acked = 0
    for entry_id in ids:
        if call(b"XPENDING", stream, group, entry_id, entry_id, b"1", consumer):
            acked += call(b"XACK", stream, group, entry_id)
    return acked
