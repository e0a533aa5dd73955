"""What a link is. Above it semantics are the same by construction; below it, by the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millstream.wire import Args, Batch, Command


@dataclass(frozen=True, slots=True)
class Features:
    """Physics, never semantics."""

    cluster: bool = False
    """Keys live on several nodes."""
    embedded: bool = False
    """The data lives in this process."""
    survives_restart: bool = True


class Link(Protocol):
    """Usable from any thread and any event loop. After a fork it makes new connections, or says why it cannot."""

    features: Features
    now: Callable[[Args], Any] | None
    """Answers the words of a command that does not wait, at once; None where every answer comes from a server."""

    async def call(self, command: Command) -> Any:
        """The reply; an error reply is raised as its typed error."""

    async def call_many(self, batch: Batch) -> list[Any]:
        """The replies in order, error replies among them as values. Of a batch with ``keys`` each is answered for
        itself: a BrokerUnavailable stands where a node did not answer, and is raised where none did."""

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        """Messages of the channels that match. Messages sent while a connection is broken are missed."""

    async def close(self) -> None:
        """Idempotent."""


class BlockingLink(Protocol):
    """The same without ``await``."""

    features: Features
    now: Callable[[Args], Any] | None

    def call(self, command: Command) -> Any: ...

    def call_many(self, batch: Batch) -> list[Any]: ...

    def listen(self, patterns: Sequence[bytes]) -> BlockingListener: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """``async with`` waits until the subscription stands; iterating gives (channel, payload)."""

    async def __aenter__(self) -> Listener: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[tuple[bytes, bytes]]: ...


class BlockingListener(Protocol):
    def __enter__(self) -> BlockingListener: ...

    def __exit__(self, *exc: object) -> None: ...

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]: ...
