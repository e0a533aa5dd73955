"""What an operation asks of a link: one command, or several that travel together; and how names become words of it.

Names of streams, groups and consumers are just bytes to Redis. Bytes that are not UTF-8 become surrogate escapes, and
come back as the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

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
    """One key a command, instead of ``key``: in a cluster each node gets its share in one go. Never atomic."""
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
