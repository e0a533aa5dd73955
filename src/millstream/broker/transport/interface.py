"""The interfaces of transports and listeners. The conformance suite checks that all transports behave alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millstream.wire import Args, Batch, Command


@dataclass(frozen=True, slots=True)
class Features:
    """Properties in which transports differ. Operations behave the same on all transports."""

    cluster: bool = False
    """Keys are distributed over several nodes."""
    embedded: bool = False
    """The data is in this process."""
    survives_restart: bool = True


class Transport(Protocol):
    """An async transport: usable from any thread and event loop. After a fork it opens new connections, or raises."""

    features: Features
    now: Callable[[Args], Any] | None
    """Executes a command that does not wait, synchronously; None if replies come from a server."""

    async def call(self, command: Command) -> Any:
        """Sends a command and returns its reply; an error reply is raised as a typed error."""

    async def call_many(self, batch: Batch) -> list[Any]:
        """Sends a batch and returns the replies in order; error replies are values.

        In a batch with ``keys``, commands of a node that did not answer have a BrokerUnavailable as reply; it is raised
        if no node answered.
        """

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        """Messages of the channels that match. Messages that are published while a connection is broken are missed."""

    async def close(self) -> None:
        """Idempotent."""


class BlockingTransport(Protocol):
    """A transport for threads."""

    features: Features
    now: Callable[[Args], Any] | None

    def call(self, command: Command) -> Any: ...

    def call_many(self, batch: Batch) -> list[Any]: ...

    def listen(self, patterns: Sequence[bytes]) -> BlockingListener: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """A subscription for event loops: iterate it for (channel, payload) pairs. ``async with`` waits for its
    confirmation.
    """

    async def __aenter__(self) -> Listener: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[tuple[bytes, bytes]]: ...


class BlockingListener(Protocol):
    """A subscription for threads: iterate it for (channel, payload) pairs."""

    def __enter__(self) -> BlockingListener: ...

    def __exit__(self, *exc: object) -> None: ...

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]: ...


Written = Callable[[bytes], None]
"""Receives a key that was written."""


class KeyWatch(Protocol):
    """Reports the next write to each of many keys, for one event loop. A hint: reports may be missed, so callers must
    also read keys that were not reported."""

    async def run(self) -> None:
        """Connects, and reconnects, until it is cancelled. Without it no key is watched."""

    async def watch(self, keys: Collection[bytes], written: Written) -> None:
        """Watches the keys as far as possible. ``written`` is called at the next write to a key, or when the key is
        not watched any more. A key that is watched already costs nothing."""

    def covers(self, key: bytes) -> bool:
        """Whether the next write to the key will be reported."""

    def forget(self, key: bytes) -> None:
        """Stops watching the key."""

    async def verify(self, keys: Iterable[bytes]) -> None:
        """Called with keys that were written without a report: stops watching on nodes whose reports never arrive."""
