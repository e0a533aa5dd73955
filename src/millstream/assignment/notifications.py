"""What a member is told, and the queue through which it is told. Notifications are values: compare them, match on them,
send them elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.assignment.leases import Token
from millstream.errors import MillstreamError
from millstream.model import EntryId


@dataclass(frozen=True, slots=True)
class Notification:
    stream: str
    lbs_id: EntryId
    info: Mapping[str, Any] = field(default_factory=dict)
    token: Token | None = None


@dataclass(frozen=True, slots=True)
class StreamAdded(Notification):
    """This member owns the stream now, under ``token``. ``taken_from`` names a dead owner whose work this continues."""

    kind = 1
    taken_from: str | None = None


@dataclass(frozen=True, slots=True)
class StreamDisowned(Notification):
    """This member does not own the stream any more: stop working on it. ``token`` is the one that is void now."""

    kind = 2


@dataclass(frozen=True, slots=True)
class StreamExpired(Notification):
    """Another member's lease has run out: ``claim`` it to take over. Sent where ``takeover="notify"``."""

    kind = 3


@dataclass(frozen=True, slots=True)
class StreamTerminated(Notification):
    """The stream was finished: it is announced no more, and nobody owns it."""

    kind = 4


class Notifications:
    """What ``AssignmentClient.start()`` gives: ``async for one in client.start()``.

    Awaited first (``told = await client.start()``) it comes back when the member has joined and has looked for streams
    once, and raises at once what will not pass: a wrong password, no permission, another type under the stream's name.
    Without that, whoever iterates is told. While a server is away, both wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[Notification] = deque()
        self._arrived = asyncio.Event()
        self._begun = asyncio.Event()
        self._failure: MillstreamError | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, notification: Notification) -> None:
        self._waiting.append(notification)
        self._arrived.set()

    def begin(self) -> None:
        """The member has joined, and has looked once."""
        self._begun.set()

    def fail(self, error: MillstreamError) -> None:
        """This member could never join: whoever waits is told."""
        self._failure = error
        self._begun.set()
        self._arrived.set()

    def close(self) -> None:
        """Nothing more comes; what waits can still be taken."""
        self._closed = True
        self._begun.set()
        self._arrived.set()

    def __await__(self) -> Generator[Any, None, Notifications]:
        return self._until_begun().__await__()

    async def _until_begun(self) -> Notifications:
        await self._begun.wait()
        if self._failure is not None and not self._closed:
            raise self._failure
        return self

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> Notification:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()
