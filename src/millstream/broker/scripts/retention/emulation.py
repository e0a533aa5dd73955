"""The emulations of the scripts in this folder."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream.broker.operations.conversion import mapping
from millstream.broker.scripts.emulations import clock_ms, id_order
from millstream.engine.commands.transactions import Call
from millstream.wire import Reply


def trim_safely(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key = keys[0]
    max_len, min_id, *names = argv
    if not call(b"EXISTS", key):
        return 0
    recreated = recreated_groups(call, keys[2:], names) if len(keys) > 1 else None
    groups, safe, any_recreated = read_groups(call, key, recreated)
    if any_recreated or (len(keys) > 1 and missing_groups(call, keys[1], groups)):
        return 0
    gone = 0
    if min_id:
        bound = min_id if safe is None or id_order(min_id) < id_order(safe) else safe
        gone = call(b"XTRIM", key, b"MINID", b"=", bound)
    if max_len:
        excess = call(b"XLEN", key) - int(max_len)
        if excess > 0 and safe is None:
            gone += call(b"XTRIM", key, b"MAXLEN", b"=", max_len)
        elif excess > 0 and safe is not None:
            # Whole nodes first, which is cheap; LIMIT prevents it from deleting more than the excess.
            whole = call(b"XTRIM", key, b"MINID", b"~", safe, b"LIMIT", b"%d" % excess)
            remaining = excess - whole
            gone += whole
            if remaining > 0:
                first = call(b"XRANGE", key, b"-", b"(" + safe, b"COUNT", b"%d" % (remaining + 1))
                bound = first[remaining][0] if len(first) > remaining else safe
                gone += call(b"XTRIM", key, b"MINID", b"=", bound)
    return gone


_MARK = re.compile(rb"(\d+) (\d+-\d+);")
_EXACT = 2**53 - 1


@dataclass
class GroupNeeds:
    name: bytes
    last: tuple[int, int]
    pending: int
    needs: bytes | None = None
    holds: int = 0
    undelivered: int = 0
    unacked: int = 0


def following(raw: bytes) -> bytes:
    """The next id; the same id if Lua cannot compute it exactly."""
    ms, seq = id_order(raw)
    return raw if seq >= _EXACT else b"%d-%d" % (ms, seq + 1)


def retain(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, marks, losses = keys[:3]
    given_now, max_age, max_len, keep_acked, hard, step_arg = argv[:6]
    hard_age, checks_declared = argv[6:8]
    step = int(step_arg)
    if not call(b"EXISTS", key):
        return [0, 0, 0, 0, []]
    now = int(given_now) if given_now else clock_ms(call)
    groups, safe, _ = read_groups(call, key, recreated_groups(call, keys[4:], argv[8:]))
    if missing_groups(call, keys[3], groups):
        if checks_declared == b"1":
            return [0, call(b"XLEN", key), 0, 0, []]
        safe = first_id(call, key)
    cut = b"%d-0" % (now - int(max_age)) if max_age and now > int(max_age) else None
    if keep_acked and groups:
        last = mapping(call(b"XINFO", b"STREAM", key))[b"last-generated-id"]
        bound = acked_bound(call, marks, now, int(keep_acked), safe or following(last))
        if bound is not None and (cut is None or id_order(cut) < id_order(bound)):
            cut = bound

    dropped, has_more, taken = 0, 0, 0
    if cut is not None:
        upto = safe if safe is not None and id_order(safe) < id_order(cut) else cut
        dropped, has_more = trim(call, key, b"MINID", upto, step * 10)
    excess = call(b"XLEN", key) - int(max_len) if max_len and not has_more else 0
    if excess > 0:
        gone, has_more = drop_excess(call, key, excess, safe, int(max_len), step)
        dropped += gone
    excess = call(b"XLEN", key) - int(hard) if hard and not has_more else 0
    if hard_age and not has_more and now > int(hard_age):
        old = call(b"XRANGE", key, b"-", b"(%d-0" % (now - int(hard_age)), b"COUNT", b"%d" % (step + 1))
        excess = max(excess, len(old))
    if excess > 0:
        taken = drop_for_hard_limit(call, key, losses, groups, min(excess, step))
        dropped += taken
        if excess > step and taken > 0:
            has_more = 1

    length = call(b"XLEN", key)
    if safe is not None and not has_more and (cut is not None or max_len):
        count_held(call, key, groups, cut, length - int(max_len) if max_len else 0, step_arg)
    reports = [[g.name, g.needs or b"", g.holds, g.undelivered, g.unacked] for g in groups]
    return [dropped, length, has_more, taken, reports]


def recreated_groups(call: Call, keys: list[bytes], names: list[bytes]) -> dict[bytes, bool]:
    return {name: call(b"EXISTS", key) == 1 for key, name in zip(keys, names, strict=True)}


def read_groups(
    call: Call, key: bytes, recreated: dict[bytes, bool] | None
) -> tuple[list[GroupNeeds], bytes | None, bool]:
    """The groups, the oldest entry that any of them needs, and whether a group was recreated.

    ``recreated`` is None if the stream cannot have companion keys.
    """
    groups = [group_needs(call, key, flat) for flat in call(b"XINFO", b"GROUPS", key)]
    incomplete = [group for group in groups if recreated is not None and recreated.get(group.name, True)]
    for group in incomplete:
        group.needs = first_id(call, key)
    safe = min((group.needs for group in groups if group.needs is not None), key=id_order, default=None)
    return groups, safe, bool(incomplete)


def first_id(call: Call, key: bytes) -> bytes | None:
    """The id of the stream's first entry; None if it has none."""
    first = call(b"XRANGE", key, b"-", b"+", b"COUNT", b"1")
    return first[0][0] if first else None


def missing_groups(call: Call, record: bytes, groups: list[GroupNeeds]) -> list[bytes]:
    """The groups that live workers declare in the retention record and that the stream does not have."""
    existing = {group.name for group in groups}
    fields = call(b"HGETALL", record)
    return [
        name
        for field, until in zip(fields[::2], fields[1::2], strict=True)
        if field.startswith(b"group ")
        and (name := field[6:]) not in existing
        and (not until.isdigit() or int(until) > clock_ms(call))
    ]


def trim(call: Call, key: bytes, strategy: bytes, threshold: bytes, limit: int) -> tuple[int, int]:
    """Trims about ``limit`` entries at most, whole nodes first. Returns how many, and 1 if there may be more."""
    gone: int = call(b"XTRIM", key, strategy, b"~", threshold, b"LIMIT", b"%d" % limit)
    if gone * 2 > limit:
        return gone, 1
    return gone + call(b"XTRIM", key, strategy, b"=", threshold), 0


def group_needs(call: Call, key: bytes, flat: list[bytes]) -> GroupNeeds:
    """The oldest entry that the group still needs: unread, or pending and not deleted."""
    info = mapping(flat)
    group = GroupNeeds(info[b"name"], id_order(info[b"last-delivered-id"]), info[b"pending"])
    # A range after the greatest possible id is an error.
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
    recorded = [(int(at), id) for at, id in _MARK.findall(call(b"GET", marks) or b"")]
    if not recorded or now - recorded[-1][0] >= max(1, keep // 16):
        recorded.append((now, done))
    bound, first = None, 0
    for index, (at, id) in enumerate(recorded):
        if at <= now - keep:
            bound, first = id, index
    text = b"".join(b"%d %b;" % mark for mark in recorded[first:])
    call(b"SET", marks, text, b"PX", b"%d" % (keep * 2 + 86_400_000))
    return bound


def drop_excess(call: Call, key: bytes, excess: int, safe: bytes | None, max_len: int, step: int) -> tuple[int, int]:
    if safe is None:
        return trim(call, key, b"MAXLEN", b"%d" % max_len, step * 10)
    limit = min(excess, step * 10)
    dropped: int = call(b"XTRIM", key, b"MINID", b"~", safe, b"LIMIT", b"%d" % limit)
    excess -= dropped
    if limit < excess and dropped * 2 > limit:
        return dropped, 1
    if not excess:
        return dropped, 0
    at_most, upto, has_more = min(excess, step), safe, 0
    head = call(b"XRANGE", key, b"-", b"(" + safe, b"COUNT", b"%d" % (at_most + 1))
    if len(head) > at_most:
        upto = head[-1][0]
        has_more = 1 if excess > step else 0
    return dropped + call(b"XTRIM", key, b"MINID", b"=", upto), has_more


def drop_for_hard_limit(call: Call, key: bytes, losses: bytes, groups: list[GroupNeeds], count: int) -> int:
    """The hard limit: deletes the oldest entries, and counts for each group those that it was not done with."""
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


def delete_acked(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    key, record = keys[:2]
    cursor, step = argv[0], int(argv[1])
    if not call(b"EXISTS", key):
        return [0, 0, 0, b""]
    groups, safe, any_recreated = read_groups(call, key, recreated_groups(call, keys[2:], argv[2:]))
    if not groups or any_recreated or missing_groups(call, record, groups):
        return [0, call(b"XLEN", key), 0, b""]
    read = min(group.last for group in groups)
    last_read = b"%d-%d" % read
    deleted = 0
    if not cursor:
        deleted, has_more = trim(call, key, b"MINID", safe or following(last_read), step * 10)
        if has_more or safe is None or read < id_order(safe):
            return [deleted, call(b"XLEN", key), has_more, b""]
    head = []
    if not cursor or id_order(cursor) < read:
        start = b"(" + cursor if cursor else b"-"
        head = call(b"XRANGE", key, start, last_read, b"COUNT", argv[1])
    if not head:
        return [deleted, call(b"XLEN", key), 0, b""]
    first, last = head[0][0], head[-1][0]
    pending: set[bytes] = set()
    for group in groups:
        if group.pending:
            items = call(b"XPENDING", key, group.name, first, last, b"%d" % group.pending)
            pending.update(item[0] for item in items)
    acked = [entry[0] for entry in head if entry[0] not in pending]
    if acked:
        deleted += call(b"XDEL", key, *acked)
    if len(head) < step:
        return [deleted, call(b"XLEN", key), 0, b""]
    return [deleted, call(b"XLEN", key), 1, last]


def keep_declare(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    record, lease_key, stream = keys
    worker, policy, declared_ms, lease_ms, *declared_groups = argv
    now = clock_ms(call)
    lease = call(b"GET", lease_key)
    is_mine = lease is not None and lease.partition(b" ")[2] == worker
    if declared_ms == b"0":
        call(b"HDEL", record, b"worker " + worker)
        if is_mine:
            call(b"DEL", lease_key)
        return [b"", [], []]
    existing = (
        {mapping(info)[b"name"] for info in call(b"XINFO", b"GROUPS", stream)} if call(b"EXISTS", stream) else set()
    )
    till = b"%d" % (now + int(declared_ms))
    call(b"HSET", record, b"worker " + worker, till + b" " + policy)
    for group in declared_groups:
        call(b"HSET", record, b"group " + group, till)
    other_records: list[bytes] = []
    missing: list[bytes] = []
    fields = call(b"HGETALL", record)
    for field, value in zip(fields[::2], fields[1::2], strict=True):
        kind, _, name = field.partition(b" ")
        ends, _, declared = value.partition(b" ")
        if not ends.isdigit() or int(ends) <= now:
            call(b"HDEL", record, field)
        elif kind == b"group" and name not in existing:
            missing.append(name)
        elif kind == b"worker" and name != worker and declared != policy:
            other_records += [name, declared]
    if call(b"PTTL", record) < int(declared_ms):
        call(b"PEXPIRE", record, declared_ms)
    if lease is None:
        lease = b"%d %b" % (now, worker)
        call(b"SET", lease_key, lease, b"PX", lease_ms)
    elif is_mine:
        call(b"PEXPIRE", lease_key, lease_ms)
    else:
        # Far more than a lease: the server's clock was set back.
        if call(b"PTTL", lease_key) > 10 * int(lease_ms):
            call(b"PEXPIRE", lease_key, lease_ms)
        return [b"", other_records, missing]
    return [lease, other_records, missing]
