"""Encodes commands and replies as bytes, exactly as Redis 7.0 sends them.

``encode`` is on the server's hot path: common types (a bulk string, an integer, a list of entries) are tested first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis

from millstream.wire.commands import (
    NIL_ARRAY,
    OK,
    PONG,
    QUEUED,
    Double,
    ErrorReply,
    Map,
    Members,
    Pairs,
    Push,
    Reply,
    Several,
    Status,
    Verbatim,
)

Add = Callable[[bytes], Any]
"""Receives the next piece of output: a list's ``append``, a bytearray's ``extend``."""

_COMMON: Final = {id(status): b"+%b\r\n" % bytes(status) for status in (OK, QUEUED, PONG)}


def pack(args: Sequence[bytes]) -> bytes:
    """Encodes a command as an array of bulk strings, as clients send it and as the journal stores it."""
    packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]  # its type stub allows only one argument
    return packed


def encode(reply: Reply, protocol: int = 2) -> bytes:
    """Encodes a reply as RESP2 or RESP3."""
    kind = type(reply)
    if kind is bytes:
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if kind is int:
        return b":%d\r\n" % reply
    if kind is Status:
        return _COMMON.get(id(reply)) or b"+%b\r\n" % bytes(reply)
    pieces: list[bytes] = []
    encode_into(pieces.append, reply, protocol)
    return b"".join(pieces)


def encode_into(add: Add, reply: Reply, protocol: int = 2) -> None:
    """Passes the pieces of the encoded reply to ``add`` in order, for replies that are too large for one bytes
    object.
    """
    kind = type(reply)
    if kind is bytes:
        add(b"$%d\r\n%b\r\n" % (len(reply), reply))
    elif kind is list:
        _encode_array(add, reply, protocol)
    else:
        encoder = _ENCODERS.get(kind)
        if encoder is None:
            encoder = _inherited_encoder(kind)
        encoder(add, reply, protocol)


def _encode_array(add: Add, items: Sequence[Reply], protocol: int) -> None:
    add(b"*%d\r\n" % len(items))
    _encode_items(add, items, protocol)


def _encode_items(add: Add, items: Sequence[Reply], protocol: int) -> None:
    for item in items:
        kind = type(item)
        if kind is bytes:
            add(b"$%d\r\n%b\r\n" % (len(item), item))
        elif kind is not list:
            encode_into(add, item, protocol)
        elif not _encode_entry(add, item):
            add(b"*%d\r\n" % len(item))
            _encode_items(add, item, protocol)


def _encode_entry(add: Add, item: list[Any]) -> bool:
    """Encodes an entry with one field, the most common kind, in one step: twice as fast as encoding its parts."""
    if len(item) != 2:
        return False
    head, fields = item
    if type(head) is not bytes or type(fields) is not list or len(fields) != 2:
        return False
    name, value = fields
    if type(name) is not bytes or type(value) is not bytes:
        return False
    add(b"*2\r\n$%d\r\n%b\r\n*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(head), head, len(name), name, len(value), value))
    return True


def _encode_int(add: Add, reply: int, protocol: int) -> None:
    add(b":%d\r\n" % reply)


def _encode_status(add: Add, reply: Status, protocol: int) -> None:
    add(b"+%b\r\n" % bytes(reply))


def _encode_null(add: Add, reply: None, protocol: int) -> None:
    add(b"$-1\r\n" if protocol == 2 else b"_\r\n")


def _encode_nil_array(add: Add, reply: Any, protocol: int) -> None:
    add(b"*-1\r\n" if protocol == 2 else b"_\r\n")


def _encode_error(add: Add, reply: ErrorReply, protocol: int) -> None:
    # A line break would end the error reply early, and the client would read the remainder as the next reply.
    text = reply.text.replace("\r", " ").replace("\n", " ")
    add(b"-%b\r\n" % text.encode("utf-8", "surrogateescape"))


def _encode_map(add: Add, reply: Map, protocol: int) -> None:
    add(b"*%d\r\n" % len(reply) if protocol == 2 else b"%%%d\r\n" % (len(reply) // 2))
    _encode_items(add, reply, protocol)


def _encode_pairs(add: Add, reply: Pairs, protocol: int) -> None:
    if protocol == 2:
        _encode_array(add, reply, protocol)
        return
    add(b"%%%d\r\n" % len(reply))
    for pair in reply:
        _encode_items(add, pair, protocol)


def _encode_members(add: Add, reply: Members, protocol: int) -> None:
    add(b"*%d\r\n" % len(reply) if protocol == 2 else b"~%d\r\n" % len(reply))
    _encode_items(add, reply, protocol)


def _encode_push(add: Add, reply: Push, protocol: int) -> None:
    add(b"*%d\r\n" % len(reply) if protocol == 2 else b">%d\r\n" % len(reply))
    _encode_items(add, reply, protocol)


def format_double(number: float) -> bytes:
    """Formats a double as Redis 7.0 does: ``%.17g``, and ``inf`` without decimals."""
    if math.isinf(number):
        return b"inf" if number > 0 else b"-inf"
    return b"%.17g" % number


def _encode_double(add: Add, reply: Double, protocol: int) -> None:
    text = format_double(reply)
    add(b"$%d\r\n%b\r\n" % (len(text), text) if protocol == 2 else b",%b\r\n" % text)


def _encode_verbatim(add: Add, reply: Verbatim, protocol: int) -> None:
    text = bytes(reply)
    add(b"$%d\r\n%b\r\n" % (len(text), text) if protocol == 2 else b"=%d\r\ntxt:%b\r\n" % (len(text) + 4, text))


_ENCODERS: Final[dict[type, Callable[[Add, Any, int], None]]] = {
    int: _encode_int,
    bool: _encode_int,
    type(None): _encode_null,
    type(NIL_ARRAY): _encode_nil_array,
    Status: _encode_status,
    ErrorReply: _encode_error,
    Map: _encode_map,
    Pairs: _encode_pairs,
    Members: _encode_members,
    Push: _encode_push,
    Several: _encode_items,
    Double: _encode_double,
    float: _encode_double,
    Verbatim: _encode_verbatim,
    tuple: _encode_array,
}


def _inherited_encoder(kind: type) -> Callable[[Add, Any, int], None]:
    """The encoder of the nearest base class, for a subclass of a reply type."""
    for ancestor in kind.__mro__[1:]:
        if ancestor in _ENCODERS:
            return _ENCODERS[ancestor]
        if ancestor is bytes:
            return lambda add, reply, protocol: add(b"$%d\r\n%b\r\n" % (len(reply), bytes(reply)))
        if ancestor is list:
            return _encode_array
    raise TypeError(f"{kind.__name__} is not a reply type")
