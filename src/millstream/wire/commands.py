"""Commands, batches and operations that are sent to a transport, and the types of replies that a server gives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

R = TypeVar("R")

Args = tuple[bytes, ...]
"""The arguments of a command, its name first, as they are sent."""


class Command(NamedTuple):
    """One command, and what a transport must know to send it."""

    args: Args
    key: bytes | None = None
    """The key that decides the cluster node; None: any node."""
    repeatable: bool = False
    """True if executing the command twice leaves the same state and gives the same reply as once. The transport may
    then send it again if the connection breaks before the reply arrives.
    """
    block_ms: int | None = None
    """How long the server may delay the reply (0: without a limit). Such a command uses a connection of its own."""
    on_wait: Callable[[int], None] | None = None
    """Called before the command waits, with the number of its connection, which CLIENT UNBLOCK can use; 0 if it is
    unknown.
    """


Reading = Callable[[list[Any]], list[Any]]
"""Converts replies into values, one for each reply; an error reply stays as it is."""


def return_unchanged(replies: list[Any]) -> list[Any]:
    """Returns replies unchanged."""
    return replies


class Batch(NamedTuple):
    """Commands that are sent in one round trip to the node of ``key``. Replies are in order; errors are values."""

    commands: Sequence[Args]
    key: bytes | None = None
    atomic: bool = False
    """Send the commands as one MULTI/EXEC: no other command runs in between, and if one is rejected, all are."""
    repeatable: bool = False
    same_connection: bool = False
    """Use one connection for all commands and no other requests meanwhile (WAIT after a write)."""
    after: Args | None = None
    """One more command on the same connection, after EXEC if the batch is atomic; its reply is the last."""
    keys: Sequence[bytes] | None = None
    """One key for each command, instead of ``key``. On a cluster each node receives its commands in one round trip. If
    a node does not answer, only its commands get an error as reply. Never atomic.
    """
    reading: Reading = return_unchanged
    """Converts the replies, except that of ``after``. A server transport calls it for each chunk of replies, while the
    server executes the commands after it.
    """

    def read(self, replies: list[Any]) -> list[Any]:
        """Converts all replies as ``reading`` asks."""
        if self.after is None:
            return self.reading(replies)
        return [*self.reading(replies[:-1]), replies[-1]]


Operation = Generator[Command | Batch, Any, R]
"""An operation: a generator that yields commands or batches, receives the replies, and returns the result. It does no
I/O.

An error reply to a Command is raised in the generator as a typed error; in the replies to a Batch it is an item of the
list. The same operation runs over a blocking transport, an async transport, or a list of replies in a test.
"""


def to_bytes(name: str | bytes) -> bytes:
    """Encodes a name; bytes pass unchanged."""
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def to_name(raw: bytes) -> str:
    """Decodes a name; undecodable bytes become surrogate escapes."""
    return raw.decode("utf-8", "surrogateescape")


Reply = Any  # bytes | int | None | list[Reply] | one of the classes below


class Status(bytes):
    """A simple string (``+OK``)."""


class Map(list[Any]):
    """Keys and values in turn: a flat array in RESP2, a map in RESP3 (XINFO, HGETALL, CONFIG GET)."""

    @classmethod
    def of(cls, fields: Mapping[bytes, Any]) -> Map:
        return cls(part for field in fields.items() for part in field)


class Pairs(list[Any]):
    """Pairs: an array of two-element arrays in RESP2, a map in RESP3 (XREAD, XREADGROUP)."""


class Members(list[Any]):
    """A set: an array in RESP2, a set in RESP3 (SMEMBERS)."""


class Push(list[Any]):
    """Out-of-band data: an array in RESP2, a push in RESP3 (messages of pub/sub)."""


class Several(list[Any]):
    """Several replies to one command, written one after another without a header (SUBSCRIBE to many channels). Empty if
    no reply is sent (CLIENT REPLY OFF).
    """


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
"""The null array of RESP2 (``*-1``): a timed-out XREAD, an aborted EXEC. RESP3 has only one null."""


class ErrorReply(Exception):
    """An error reply of a server. The engine raises it inside a command; ``execute`` returns it as a value."""

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
