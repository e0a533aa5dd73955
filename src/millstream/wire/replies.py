"""The kinds of reply that a server gives, as Python values.

Plain types carry the common kinds: ``bytes`` a bulk string, ``int`` an integer, ``None`` a null, ``list`` an array.
The classes below are those plain types with a mark, so that code that reads RESP2 shapes can ignore them,
and only the encoder looks at the mark.
"""

from __future__ import annotations

from typing import Any, Final

Reply = Any  # bytes | int | None | list[Reply] | one of the classes below


class Status(bytes):
    """A simple string (``+OK``)."""


class Map(list[Any]):
    """Keys and values in turn: a flat array in RESP2, a map in RESP3 (XINFO, HGETALL, CONFIG GET)."""


class Pairs(list[Any]):
    """Pairs: an array of two-element arrays in RESP2, a map in RESP3 (XREAD, XREADGROUP)."""


class Members(list[Any]):
    """A set: an array in RESP2, a set in RESP3 (SMEMBERS)."""


class Push(list[Any]):
    """Out-of-band data: an array in RESP2, a push in RESP3 (messages of pub/sub)."""


class Several(list[Any]):
    """Several replies in a row to one command (SUBSCRIBE with many channels); empty where no reply at all is sent
    (CLIENT REPLY OFF). The encoder writes them one after the other, without a header."""


class Double(float):
    """A double: a bulk string in RESP2, a double in RESP3 (ZSCORE)."""


class Verbatim(bytes):
    """A text: a bulk string in RESP2, a verbatim string in RESP3 (INFO)."""


class _NilArray:
    def __repr__(self) -> str:
        return "NIL_ARRAY"

    def __bool__(self) -> bool:
        return False


NIL_ARRAY: Final = _NilArray()
"""The null array of RESP2 (``*-1``): a timed-out XREAD, an aborted EXEC. In RESP3 it is the one null."""


class ErrorReply(Exception):
    """An error reply. The engine raises it inside a command and returns it as a value from ``execute``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ErrorReply) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ErrorReply, (self.text,)


OK: Final = Status(b"OK")
QUEUED: Final = Status(b"QUEUED")
PONG: Final = Status(b"PONG")
