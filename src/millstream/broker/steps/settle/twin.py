"""The twins of the scripts in this folder: each function does what the script of its name does."""

from __future__ import annotations

from millstream.broker.steps.twins import clock_ms
from millstream.engine import Call
from millstream.wire import ErrorReply, Reply


def settle(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
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
        at = b"%d" % (clock_ms(call) + int(number))
        for entry_id in kept:
            call(b"ZADD", due, at, entry_id)
    return [refused, known, gone]


def settle_bury(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    (key, dlq), (group, me, times, entry_id) = keys, argv[:4]
    held = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
    if not held or held[0][3] != int(times):
        return None
    letter = call(b"XADD", dlq, b"*", *argv[4:])
    call(b"XACK", key, group, entry_id)
    return letter


def settle_outputs(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, group, me = keys[0], argv[0], argv[1]
    for target in keys[1:]:
        if call(b"TYPE", target) not in (b"stream", b"none"):
            return ErrorReply("WRONGTYPE Operation against a key holding the wrong kind of value")
    answer: list[list[bytes] | None] = []
    at = 2
    while at < len(argv):
        entry_id, times, outputs = argv[at], int(argv[at + 1]), int(argv[at + 2])
        at += 3
        held = call(b"XPENDING", key, group, entry_id, entry_id, b"1", me)
        mine = bool(held) and held[0][3] == times
        ids: list[bytes] = []
        for _ in range(outputs):
            target, words = keys[int(argv[at]) - 1], int(argv[at + 1])
            if mine:
                ids.append(call(b"XADD", target, b"*", *argv[at + 2 : at + 2 + words]))
            at += 2 + words
        if mine:
            call(b"XACK", key, group, entry_id)
            answer.append(ids)
        else:
            answer.append(None)
    return answer


def ack_fenced(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    group, consumer, *ids = argv
    acked = 0
    for entry_id in ids:
        if call(b"XPENDING", stream, group, entry_id, entry_id, b"1", consumer):
            acked += call(b"XACK", stream, group, entry_id)
    return acked
