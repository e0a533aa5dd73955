"""The emulations of the scripts in this folder."""

from __future__ import annotations

import re

from millstream.broker.scripts.emulations import clock_ms
from millstream.engine.commands.transactions import Call
from millstream.wire import ErrorReply, Reply

_MEMBER_ROW = re.compile(rb"[0-9]+ .* [0-9]+", re.DOTALL)
_DIGITS = re.compile(rb"[0-9]+")


def member_heartbeat(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    member, lease_ms, owned, capacity, ttl_ms, forget_ms = argv
    now = clock_ms(call)
    if lease_ms == b"0":
        call(b"HDEL", keys[0], member)
    else:
        call(b"HSET", keys[0], member, b"%d %b %b %b" % (now + int(lease_ms), owned, capacity, lease_ms))
        call(b"PEXPIRE", keys[0], ttl_ms)
    rows = call(b"HGETALL", keys[0])
    reply = [now, call(b"XLEN", keys[1])]
    for name, row in zip(rows[::2], rows[1::2], strict=True):
        if _MEMBER_ROW.fullmatch(row) is None:
            reply += [name, row]
            continue
        written, details = row.split(b" ", 1)
        expires = min(int(written), now + int(details.rsplit(b" ", 1)[1]))
        limited = b"%d %b" % (expires, details)
        if limited != row:
            call(b"HSET", keys[0], name, limited)
        if expires + int(forget_ms) < now:
            call(b"HDEL", keys[0], name)
        else:
            reply += [name, limited]
    return reply


def lease_take(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    member, expected, ttl_ms = argv
    current = call(b"GET", keys[0]) or b""
    if current != expected:
        return [0, current]
    now = clock_ms(call)
    digits = _DIGITS.match(current)
    last = int(digits[0]) if digits else 0
    number = b"%d" % max(now, last + 1)
    call(b"SET", keys[0], number + b" " + member, b"PX", ttl_ms)
    return [1, number]


def lease_release(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    record, ttl_ms = argv
    if call(b"GET", keys[0]) != record:
        return 0
    call(b"SET", keys[0], record.split(b" ", 1)[0] + b" ", b"PX", ttl_ms)
    return 1


def lock_release(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    return call(b"DEL", keys[0]) if call(b"GET", keys[0]) == argv[0] else 0


def balancer_finish(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    group, member, entry_id = argv
    if not call(b"XPENDING", keys[0], group, entry_id, entry_id, b"1", member):
        return 0
    call(b"XACK", keys[0], group, entry_id)
    call(b"XDEL", keys[0], entry_id)
    return 1


def write(call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    if argv[0] not in (b"XADD", b"XACK"):
        return ErrorReply("ERR write takes XADD and XACK")
    return call(argv[0], keys[0], *argv[1:])
