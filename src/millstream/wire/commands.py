"""What is asked of a link, one command or several that travel together, and the kinds of reply that a server gives; and
how names become words of either.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

R = TypeVar("R")

Args = tuple[bytes, ...]
"""A command's words, name first, exactly as they travel."""


class Command(NamedTuple):
    """One command and what a link must know to send it well."""

    args: Args
    key: bytes | None = None
    """Decides the node in a cluster; None goes to any node."""
    repeatable: bool = False
    """True when executing it twice leaves the same state and the same answer as once, so that a link may send it again
    after a connection broke before the answer came."""
    block_ms: int | None = None
    """How long the server may hold the answer back (0: for ever). Such a command gets a connection of its own."""
    on_wait: Callable[[int], None] | None = None
    """Told, before it waits, the number of its connection: CLIENT UNBLOCK wakes it there. 0 where nobody knows it."""


Reading = Callable[[list[Any]], list[Any]]
"""Turns replies into values, one for one; an error among them stays what it is."""


def as_they_are(replies: list[Any]) -> list[Any]:
    return replies


class Batch(NamedTuple):
    """Commands that travel in one go, all for the node of ``key``. Replies come back in order, errors as values."""

    commands: Sequence[Args]
    key: bytes | None = None
    atomic: bool = False
    """One MULTI/EXEC: nothing of anybody else's comes in between, and a refusal refuses all of them."""
    repeatable: bool = False
    same_connection: bool = False
    """The order of arrival on one connection matters (WAIT after a write). Pipelines without it may still share one."""
    after: Args | None = None
    """One more command, sent on the same connection after EXEC where the batch is atomic; its reply comes last."""
    keys: Sequence[bytes] | None = None
    """One key a command, instead of ``key``: in a cluster each node gets its share in one go, and what a node does not
    answer is an error in the places of its commands alone. Never atomic."""
    reading: Reading = as_they_are
    """What the replies are turned into, all but that of ``after``. A link to a server does it with those that have
    come, while the server works on the rest."""

    def read(self, replies: list[Any]) -> list[Any]:
        """All replies at once, turned into what the batch asks for."""
        if self.after is None:
            return self.reading(replies)
        return [*self.reading(replies[:-1]), replies[-1]]


Conversation = Generator[Command | Batch, Any, R]
"""An operation, written once: it yields what it asks, receives replies, and returns its result.

An error reply to a Command is thrown in as the typed error; in the replies to a Batch it is an item of the list.
A driver of a dozen lines runs it over a blocking link, another over an async link; a test runs it over a list.
"""


def to_bytes(name: str | bytes) -> bytes:
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def to_name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


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
