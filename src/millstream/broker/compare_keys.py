"""Whether a key is the same in two places: the same questions to both, and one hash over the answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from millstream.wire import format_double

PAGE: Final = 1000

Ask = Callable[..., Any]
"""Sends a command's words; returns the reply in RESP2's shapes, raises an error reply."""


class StreamCounts(NamedTuple):
    entries: int
    groups: int
    consumers: int
    pending: int


def fingerprint(ask: Ask, key: bytes) -> bytes:
    """Type, value and expiry. Of a stream: all entries, counters, groups, consumers, and pending entries with their
    delivery counts and times."""
    hashed = hashlib.sha256()
    kind = ask(b"TYPE", key)
    for answer in (bytes(kind), ask(b"PEXPIRETIME", key), *_value(ask, key, bytes(kind))):
        hashed.update(repr(_plain(answer)).encode())
    return hashed.digest()


def counts_of_stream(ask: Ask, key: bytes) -> StreamCounts:
    groups = [_fields(group) for group in ask(b"XINFO", b"GROUPS", key)]
    return StreamCounts(
        ask(b"XLEN", key),
        len(groups),
        sum(group[b"consumers"] for group in groups),
        sum(group[b"pending"] for group in groups),
    )


def _value(ask: Ask, key: bytes, kind: bytes) -> Iterator[Any]:
    match kind:
        case b"string":
            yield ask(b"GET", key)
        case b"list":
            yield ask(b"LRANGE", key, b"0", b"-1")
        case b"set":
            yield sorted(ask(b"SMEMBERS", key))
        case b"zset":
            yield ask(b"ZRANGE", key, b"0", b"-1", b"WITHSCORES")
        case b"hash":
            flat = ask(b"HGETALL", key)
            yield sorted(zip(flat[::2], flat[1::2], strict=True))
        case b"stream":
            yield from _stream(ask, key)


def _stream(ask: Ask, key: bytes) -> Iterator[Any]:
    info = _fields(ask(b"XINFO", b"STREAM", key))
    yield [info.get(name) for name in (b"length", b"last-generated-id", b"max-deleted-entry-id", b"entries-added")]
    start = b"-"
    while entries := ask(b"XRANGE", key, start, b"+", b"COUNT", b"%d" % PAGE):
        yield entries
        if len(entries) < PAGE:
            break  # after the greatest id of all there is no other, and to ask for it is an error
        start = b"(" + entries[-1][0]
    for group in ask(b"XINFO", b"GROUPS", key):
        fields = _fields(group)
        name = fields[b"name"]
        yield sorted(fields.items())
        consumers = [_fields(one) for one in ask(b"XINFO", b"CONSUMERS", key, name)]
        yield sorted((one[b"name"], one[b"pending"]) for one in consumers)
        yield from _pending(ask, key, name)
    # The first of each group with its time as such: what the others' times are relative to.
    full = _fields(ask(b"XINFO", b"STREAM", key, b"FULL", b"COUNT", b"1"))
    yield [_fields(group)[b"pending"] for group in full[b"groups"]]


def _pending(ask: Ask, key: bytes, group: bytes) -> Iterator[Any]:
    """Servers tell how long ago, each by its own clock, when they are asked. Within one answer the differences are
    exact; so each page begins with the last entry of the page before, and one time alone has to be known as such."""
    start = b"-"
    while held := ask(b"XPENDING", key, group, start, b"+", b"%d" % PAGE):
        first = held[0][2]
        yield [[entry_id, consumer, first - idle, deliveries] for entry_id, consumer, idle, deliveries in held]
        if len(held) < PAGE:
            break
        start = held[-1][0]


def _fields(flat: list[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _plain(answer: Any) -> Any:
    """Without the marks that reply kinds carry: two servers may differ in them."""
    if isinstance(answer, list | tuple):
        return [_plain(item) for item in answer]
    if isinstance(answer, bytes):
        return bytes(answer)
    return format_double(answer) if isinstance(answer, float) else answer
