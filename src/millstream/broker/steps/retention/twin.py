"""The twins of the scripts in this folder: each function does what the script of its name does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream.broker.operations.conversion import mapping
from millstream.broker.steps.twins import clock_ms, id_order
from millstream.engine import Call
from millstream.wire import Reply


def trim_safely(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    stream = keys[0]
    max_len, min_id = argv
    if call(b"TYPE", stream) == b"none":
        return 0
    safe: bytes | None = None  # ids from here on are needed; None: there is no group
    for facts in call(b"XINFO", b"GROUPS", stream):
        group = mapping(facts)
        needed = after(group[b"last-delivered-id"])
        if group[b"pending"] > 0:
            oldest = call(b"XPENDING", stream, group[b"name"])[1]
            if id_order(oldest) < id_order(needed):
                needed = oldest
        if safe is None or id_order(needed) < id_order(safe):
            safe = needed

    gone = 0
    if min_id:
        bound = min_id if safe is None or id_order(min_id) < id_order(safe) else safe
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


def after(entry_id: bytes) -> bytes:
    ms, _, seq = entry_id.partition(b"-")
    if len(seq) > 15:
        return entry_id  # as in the script, whose numbers end here: keep this one entry too
    return b"%b-%d" % (ms, int(seq) + 1)


_MARK = re.compile(rb"(\d+) (\d+-\d+);")
_EXACT = 2**53 - 1


@dataclass
class GroupNeeds:
    name: bytes
    last: tuple[int, int]
    needs: bytes | None = None
    holds: int = 0
    undelivered: int = 0
    unacked: int = 0


def following(raw: bytes) -> bytes:
    """The id after this one; the same one where Lua cannot tell it exactly."""
    ms, seq = id_order(raw)
    return raw if seq >= _EXACT else b"%d-%d" % (ms, seq + 1)


def retain(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, marks, losses = keys
    given_now, max_age, max_len, keep_acked, hard, step_word = argv[:6]
    hard_age = argv[6] if len(argv) > 6 else b""
    step = int(step_word)
    if not call(b"EXISTS", key):
        return [0, 0, 0, 0, []]
    now = int(given_now) if given_now else clock_ms(call)
    groups = [look(call, key, flat) for flat in call(b"XINFO", b"GROUPS", key)]
    safe = min((group.needs for group in groups if group.needs is not None), key=id_order, default=None)
    cut = b"%d-0" % (now - int(max_age)) if max_age and now > int(max_age) else None
    if keep_acked and groups:
        last = mapping(call(b"XINFO", b"STREAM", key))[b"last-generated-id"]
        bound = acked_bound(call, marks, now, int(keep_acked), safe or following(last))
        if bound is not None and (cut is None or id_order(cut) < id_order(bound)):
            cut = bound

    dropped, more, taken = 0, 0, 0
    if cut is not None:
        upto = safe if safe is not None and id_order(safe) < id_order(cut) else cut
        dropped = call(b"XTRIM", key, b"MINID", b"=", upto)
    excess = call(b"XLEN", key) - int(max_len) if max_len else 0
    if excess > 0:
        gone, more = drop_excess(call, key, excess, safe, int(max_len), step)
        dropped += gone
    excess = call(b"XLEN", key) - int(hard) if hard and not more else 0
    if hard_age and not more and now > int(hard_age):
        old = call(b"XRANGE", key, b"-", b"(%d-0" % (now - int(hard_age)), b"COUNT", b"%d" % (step + 1))
        excess = max(excess, len(old))
    if excess > 0:
        taken = take(call, key, losses, groups, min(excess, step))
        dropped += taken
        if excess > step and taken > 0:
            more = 1

    length = call(b"XLEN", key)
    if safe is not None and not more and (cut is not None or max_len):
        count_held(call, key, groups, cut, length - int(max_len) if max_len else 0, step_word)
    told = [[g.name, g.needs or b"", g.holds, g.undelivered, g.unacked] for g in groups]
    return [dropped, length, more, taken, told]


def look(call: Call, key: bytes, flat: list[bytes]) -> GroupNeeds:
    """The oldest entry that the group still needs: unread, or pending and still there."""
    info = mapping(flat)
    group = GroupNeeds(info[b"name"], id_order(info[b"last-delivered-id"]))
    # After the greatest id of all there is no other, and to ask for it is an error.
    at_end = info[b"last-delivered-id"] == b"18446744073709551615-18446744073709551615"
    unread = [] if at_end else call(b"XRANGE", key, b"(" + info[b"last-delivered-id"], b"+", b"COUNT", b"1")
    if unread:
        group.needs = unread[0][0]
    if info[b"pending"] > 0:
        smallest = call(b"XPENDING", key, group.name)[1]
        entry = call(b"XRANGE", key, smallest, b"+", b"COUNT", b"1")
        if entry and (group.needs is None or id_order(entry[0][0]) < id_order(group.needs)):
            group.needs = entry[0][0]
    return group


def acked_bound(call: Call, marks: bytes, now: int, keep: int, done: bytes) -> bytes | None:
    if keep == 0:
        return done
    known = [(int(at), id) for at, id in _MARK.findall(call(b"GET", marks) or b"")]
    if not known or now - known[-1][0] >= max(1, keep // 16):
        known.append((now, done))
    bound, first = None, 0
    for index, (at, id) in enumerate(known):
        if at <= now - keep:
            bound, first = id, index
    text = b"".join(b"%d %b;" % mark for mark in known[first:])
    call(b"SET", marks, text, b"PX", b"%d" % (keep * 2 + 86_400_000))
    return bound


def drop_excess(call: Call, key: bytes, excess: int, safe: bytes | None, max_len: int, step: int) -> tuple[int, int]:
    if safe is None:
        return call(b"XTRIM", key, b"MAXLEN", b"=", b"%d" % max_len), 0
    dropped: int = call(b"XTRIM", key, b"MINID", b"~", safe, b"LIMIT", b"%d" % excess)
    excess -= dropped
    if not excess:
        return dropped, 0
    at_most, upto, more = min(excess, step), safe, 0
    head = call(b"XRANGE", key, b"-", b"(" + safe, b"COUNT", b"%d" % (at_most + 1))
    if len(head) > at_most:
        upto = head[-1][0]
        more = 1 if excess > step else 0
    return dropped + call(b"XTRIM", key, b"MINID", b"=", upto), more


def take(call: Call, key: bytes, losses: bytes, groups: list[GroupNeeds], count: int) -> int:
    """The hard cap: drops the oldest entries, and counts for each group what it was not done with."""
    head = call(b"XRANGE", key, b"-", b"+", b"COUNT", b"%d" % count)
    inside = {entry[0] for entry in head}
    first, last = head[0][0], head[-1][0]
    size = b"%d" % len(head)
    for group in groups:
        group.undelivered += sum(group.last < id_order(entry[0]) for entry in head)
        pending = call(b"XPENDING", key, group.name, first, last, size)
        while pending:
            group.unacked += sum(item[0] in inside and not group.last < id_order(item[0]) for item in pending)
            if len(pending) < len(head):
                break
            pending = call(b"XPENDING", key, group.name, b"(" + pending[-1][0], last, size)
        if group.undelivered + group.unacked:
            call(b"HINCRBY", losses, group.name, b"%d" % (group.undelivered + group.unacked))
    gone: int = call(b"XTRIM", key, b"MINID", b"=", following(last))
    return gone


def count_held(call: Call, key: bytes, groups: list[GroupNeeds], cut: bytes | None, excess: int, step: bytes) -> None:
    for index, entry in enumerate(call(b"XRANGE", key, b"-", b"+", b"COUNT", step), start=1):
        if not (index <= excess or (cut is not None and id_order(entry[0]) < id_order(cut))):
            break
        for group in groups:
            if group.needs is not None and id_order(entry[0]) >= id_order(group.needs):
                group.holds += 1
