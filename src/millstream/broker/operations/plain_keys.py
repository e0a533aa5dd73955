"""Operations on plain keys, which packages store next to their streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millstream.broker.context import Context
from millstream.broker.keys import LEGEND, can_have_companions, companion_key
from millstream.broker.operations.conversion import (
    Name,
    Value,
    count_arg,
    field_value_arg,
    mapping,
    name_arg,
    value_arg,
)
from millstream.errors import InvalidArgument
from millstream.wire import Batch, Command, Operation

SCAN_COUNT = b"1000"


def get(context: Context, key: Name) -> Operation[bytes | None]:
    arg = name_arg(key, "key")
    value: bytes | None = yield Command((b"GET", arg), arg, repeatable=True)
    return value


def set(
    context: Context, key: Name, value: Value, *, px: int | None = None, nx: bool = False, xx: bool = False
) -> Operation[bool]:
    if nx and xx:
        raise InvalidArgument("xx", xx, "either nx or xx")
    arg = name_arg(key, "key")
    reply = yield Command(
        (
            b"SET",
            arg,
            value_arg(value, "value"),
            *(() if px is None else (b"PX", count_arg(px, "px"))),
            *((b"NX",) if nx else (b"XX",) if xx else ()),
        ),
        arg,
        repeatable=not nx,
    )
    return bool(reply)


def delete(context: Context, *keys: Name) -> Operation[int]:
    args = [name_arg(key, "keys") for key in keys]
    if not args:
        return 0
    if not context.cluster:
        deleted: int = yield Command((b"DEL", *args), args[0])
        return deleted
    total = 0
    for arg in args:
        total += yield Command((b"DEL", arg), arg)
    return total


def exists(context: Context, key: Name) -> Operation[bool]:
    arg = name_arg(key, "key")
    return bool((yield Command((b"EXISTS", arg), arg, repeatable=True)))


def expire_ms(context: Context, key: Name, ms: int) -> Operation[bool]:
    arg = name_arg(key, "key")
    return bool((yield Command((b"PEXPIRE", arg, count_arg(ms, "ms")), arg, repeatable=True)))


def ttl_ms(context: Context, key: Name) -> Operation[int | None]:
    arg = name_arg(key, "key")
    remaining_ms: int = yield Command((b"PTTL", arg), arg, repeatable=True)
    return remaining_ms if remaining_ms >= 0 else None


def hget(context: Context, key: Name, field: Name) -> Operation[bytes | None]:
    arg = name_arg(key, "key")
    value: bytes | None = yield Command((b"HGET", arg, name_arg(field, "field")), arg, repeatable=True)
    return value


def hgetall(context: Context, key: Name) -> Operation[dict[bytes, bytes]]:
    arg = name_arg(key, "key")
    return mapping((yield Command((b"HGETALL", arg), arg, repeatable=True)))


def hset(context: Context, key: Name, fields: Mapping[str, Value]) -> Operation[int]:
    arg = name_arg(key, "key")
    args: list[bytes] = []
    if not isinstance(fields, Mapping) or not fields:
        raise InvalidArgument("fields", fields, "a mapping from field names to values, with at least one field")
    for name, value in fields.items():
        field = name_arg(name, "fields")
        args += (field, field_value_arg(field, value))
    new: int = yield Command((b"HSET", arg, *args), arg)
    return new


def hdel(context: Context, key: Name, *fields: Name) -> Operation[int]:
    arg = name_arg(key, "key")
    if not fields:
        return 0
    deleted: int = yield Command((b"HDEL", arg, *(name_arg(field, "fields") for field in fields)), arg)
    return deleted


def publish(context: Context, channel: Name, payload: Value) -> Operation[int]:
    arg = name_arg(channel, "channel")
    receivers: int = yield Command((b"PUBLISH", arg, value_arg(payload, "payload")))
    return receivers


def delete_stream(context: Context, stream: Name, *, companions: bool = False) -> Operation[bool]:
    key = name_arg(stream, "stream")
    if companions:
        for companion in (yield from companion_keys(context, key)):
            yield Command((b"DEL", companion), companion, repeatable=True)
    return bool((yield Command((b"DEL", key), key)))


class CompanionCounts(NamedTuple):
    """What a stream's companion keys contain that ``delete_stream(companions=True)`` deletes too."""

    dead_letters: int
    delayed: int
    """Delayed messages that are not published yet."""


def companion_counts(context: Context, stream: Name) -> Operation[CompanionCounts]:
    """The number of dead letters and of delayed messages of a stream."""
    key = name_arg(stream, "stream")
    if not can_have_companions(key):
        return CompanionCounts(0, 0)
    commands = ((b"XLEN", companion_key(key, "dlq")), (b"ZCARD", companion_key(key, "later")))
    replies = yield Batch(commands, key, repeatable=True)
    return CompanionCounts(*(reply if isinstance(reply, int) else 0 for reply in replies))


def companion_keys(context: Context, stream: Name) -> Operation[list[bytes]]:
    """The companion keys that a stream may have. For suffixes with a name it scans the stream's node."""
    key = name_arg(stream, "stream")
    companions: dict[bytes, None] = {}
    if not can_have_companions(key):
        return []
    for line in LEGEND:
        fixed, star, _ = line.suffix.partition("*")
        companion = companion_key(key, fixed)
        if not star:
            companions[companion] = None
            continue
        glob = b"".join(b"\\%c" % char if char in b"*?[]^\\" else b"%c" % char for char in companion) + b"*"
        cursor = b"0"
        while True:
            args = (b"SCAN", cursor, b"MATCH", glob, b"COUNT", SCAN_COUNT)
            cursor, names = yield Command(args, key, repeatable=True)
            companions.update(dict.fromkeys(names))
            if cursor == b"0":
                break
    return list(companions)
