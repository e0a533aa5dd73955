"""One trip to one server, as a value: what a journey asks of the wires, and how a trip can fail."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from millstream.broker.links.nodes import Node
from millstream.wire.commands import Args, Reading, as_they_are

R = TypeVar("R")


class Exchange(NamedTuple):
    """Send these, in order, and bring one reply for each; error replies are values."""

    node: Node
    requests: Sequence[Args]
    wait_ms: int | None = 0
    """How long the server may hold the answer back, beyond the usual; None: for ever."""
    alone: bool = False
    """On a connection that nobody else uses meanwhile."""
    whole: bool = False
    """Nothing of anybody else's may come in between on the connection (MULTI)."""
    reading: Reading = as_they_are
    """Applied to replies chunk after chunk, where the requests travel in chunks; else to all of them at once."""
    on_wait: Callable[[int], None] | None = None
    """Told the number of the connection before it waits there, alone."""


class Pause(NamedTuple):
    seconds: float


Journey = Generator[Exchange | Pause, Any, R]


class NotSent(Exception):
    """Nothing of the exchange has left: it may be tried again without a thought."""


class NoAnswer(Exception):
    """Some of it was sent, and the connection broke before all answers came. ``replies`` are those that did."""

    def __init__(self, reason: str, replies: Sequence[Any] = ()) -> None:
        super().__init__(reason)
        self.replies = replies
