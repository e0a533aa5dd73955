"""The few plain keys that rooms above keep beside their streams."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.broker.context import Context
from millstream.broker.keys import LEGEND, beside
from millstream.broker.operations.conversion import Name, Value, count_word, field_value, mapping, name_word, value_word
from millstream.errors import InvalidArgument
from millstream.wire import Command, Conversation

SCAN_STEP = b"1000"


def get(context: Context, key: Name) -> Conversation[bytes | None]:
    word = name_word(key, "key")
    value: bytes | None = yield Command((b"GET", word), word, repeatable=True)
    return value


def set(
    context: Context, key: Name, value: Value, *, px: int | None = None, nx: bool = False, xx: bool = False
) -> Conversation[bool]:
    if nx and xx:
        raise InvalidArgument("xx", xx, "either nx or xx")
    word = name_word(key, "key")
    reply = yield Command(
        (
            *(b"SET", word, value_word(value, "value")),
            *(() if px is None else (b"PX", count_word(px, "px"))),
            *((b"NX",) if nx else (b"XX",) if xx else ()),
        ),
        word,
        repeatable=not nx,
    )
    return bool(reply)


def delete(context: Context, *keys: Name) -> Conversation[int]:
    words = [name_word(key, "keys") for key in keys]
    if not words:
        return 0
    if not context.cluster:
        gone: int = yield Command((b"DEL", *words), words[0])
        return gone
    total = 0
    for word in words:
        total += yield Command((b"DEL", word), word)
    return total


def exists(context: Context, key: Name) -> Conversation[bool]:
    word = name_word(key, "key")
    return bool((yield Command((b"EXISTS", word), word, repeatable=True)))


def expire_ms(context: Context, key: Name, ms: int) -> Conversation[bool]:
    word = name_word(key, "key")
    return bool((yield Command((b"PEXPIRE", word, count_word(ms, "ms")), word, repeatable=True)))


def ttl_ms(context: Context, key: Name) -> Conversation[int | None]:
    word = name_word(key, "key")
    left: int = yield Command((b"PTTL", word), word, repeatable=True)
    return left if left >= 0 else None


def hget(context: Context, key: Name, field: Name) -> Conversation[bytes | None]:
    word = name_word(key, "key")
    value: bytes | None = yield Command((b"HGET", word, name_word(field, "field")), word, repeatable=True)
    return value


def hgetall(context: Context, key: Name) -> Conversation[dict[bytes, bytes]]:
    word = name_word(key, "key")
    return mapping((yield Command((b"HGETALL", word), word, repeatable=True)))


def hset(context: Context, key: Name, fields: Mapping[str, Value]) -> Conversation[int]:
    word = name_word(key, "key")
    words: list[bytes] = []
    if not isinstance(fields, Mapping) or not fields:
        raise InvalidArgument("fields", fields, "a mapping from field names to values, with at least one field")
    for name, value in fields.items():
        field = name_word(name, "fields")
        words += (field, field_value(field, value))
    new: int = yield Command((b"HSET", word, *words), word)
    return new


def hdel(context: Context, key: Name, *fields: Name) -> Conversation[int]:
    word = name_word(key, "key")
    if not fields:
        return 0
    gone: int = yield Command((b"HDEL", word, *(name_word(field, "fields") for field in fields)), word)
    return gone


def publish(context: Context, channel: Name, payload: Value) -> Conversation[int]:
    word = name_word(channel, "channel")
    heard: int = yield Command((b"PUBLISH", word, value_word(payload, "payload")))
    return heard


def delete_stream(context: Context, stream: Name, *, companions: bool = False) -> Conversation[bool]:
    key = name_word(stream, "stream")
    if companions:
        for companion in (yield from companion_keys(context, key)):
            yield Command((b"DEL", companion), companion, repeatable=True)
    return bool((yield Command((b"DEL", key), key)))


def companion_keys(context: Context, stream: Name) -> Conversation[list[bytes]]:
    """The keys that may lie beside the stream, after the legend. Scans the stream's node for those with free names."""
    key = name_word(stream, "stream")
    found: dict[bytes, None] = {}
    for line in LEGEND:
        fixed, star, _ = line.suffix.partition("*")
        companion = beside(key, fixed)
        if not star:
            found[companion] = None
            continue
        glob = b"".join(b"\\%c" % char if char in b"*?[]^\\" else b"%c" % char for char in companion) + b"*"
        cursor = b"0"
        while True:
            words = (b"SCAN", cursor, b"MATCH", glob, b"COUNT", SCAN_STEP)
            cursor, names = yield Command(words, key, repeatable=True)
            found.update(dict.fromkeys(names))
            if cursor == b"0":
                break
    return list(found)
