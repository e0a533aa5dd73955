"""Decodes reply bytes with their RESP types, to compare two servers byte by byte. Not optimised for speed.

A RESP3 map is decoded as Map (the wire does not distinguish it from Pairs), a push as Push. Nesting is bounded.
"""

from __future__ import annotations

from typing import Final

from millstream.wire.commands import NIL_ARRAY, Double, ErrorReply, Map, Members, Push, Reply, Status, Verbatim

MAX_NESTING: Final = 64


class MalformedReply(Exception):
    """The bytes are not RESP. ``position`` counts from the first byte that was fed and not yet taken."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(f"{what} at byte {position}")
        self.position = position


class _Incomplete(Exception):
    pass


class Decoder:
    """``feed`` adds received bytes; ``take`` returns the next complete reply, or None if there is none yet.

    A null reply is a reply, so ``take`` returns it in a tuple of one.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> tuple[Reply] | None:
        self._at = 0
        try:
            reply = self._reply(0)
        except _Incomplete:
            return None
        del self._buffer[: self._at]
        return (reply,)

    def _line(self) -> bytes:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            raise _Incomplete
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _reply(self, depth: int) -> Reply:
        start = self._at
        if depth > MAX_NESTING:
            raise MalformedReply("nested too deeply", start)
        line = self._line()
        kind, remaining = line[:1], line[1:]
        try:
            return self._of_kind(kind, remaining, depth)
        except ValueError:
            raise MalformedReply(f"not a reply: {line[:40]!r}", start) from None

    def _of_kind(self, kind: bytes, arguments: bytes, depth: int) -> Reply:
        match kind:
            case b"+":
                return Status(arguments)
            case b"-":
                return ErrorReply(arguments.decode("utf-8", "surrogateescape"))
            case b":":
                return int(arguments)
            case b"$":
                return None if arguments == b"-1" else self._bulk(int(arguments))
            case b"*":
                return NIL_ARRAY if arguments == b"-1" else self._items(int(arguments), depth)
            case b"_":
                return None
            case b",":
                return Double(arguments)
            case b"=":
                return Verbatim(self._bulk(int(arguments))[4:])
            case b"%":
                return Map(self._items(2 * int(arguments), depth))
            case b"~":
                return Members(self._items(int(arguments), depth))
            case b">":
                return Push(self._items(int(arguments), depth))
            case b"#":
                return {b"t": True, b"f": False}.get(arguments)
        raise ValueError(kind)

    def _bulk(self, size: int) -> bytes:
        end = self._at + size
        if size < 0:
            raise ValueError(size)
        if len(self._buffer) < end + 2:
            raise _Incomplete
        if self._buffer[end : end + 2] != b"\r\n":
            raise ValueError(size)
        bulk = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return bulk

    def _items(self, count: int, depth: int) -> list[Reply]:
        if count < 0:
            raise ValueError(count)
        return [self._reply(depth + 1) for _ in range(count)]


def decode(data: bytes) -> list[Reply]:
    """Every reply in ``data``, which must hold whole ones."""
    decoder = Decoder()
    decoder.feed(data)
    replies: list[Reply] = []
    while (taken := decoder.take()) is not None:
        replies.append(taken[0])
    if decoder._buffer:
        raise MalformedReply("an incomplete reply", len(data) - len(decoder._buffer))
    return replies
