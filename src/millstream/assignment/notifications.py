"""Notifications of a member to its application, and their queue. Notifications are values: they can be compared,
matched and pickled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.assignment.errors import MemberClosed
from millstream.assignment.leases import FencingToken
from millstream.errors import MillstreamError
from millstream.model import EntryId


@dataclass(frozen=True, slots=True)
class Notification:
    stream: str
    lbs_id: EntryId
    info: Mapping[str, Any] = field(default_factory=dict)
    token: FencingToken | None = None


@dataclass(frozen=True, slots=True)
class StreamAdded(Notification):
    """This member now owns the stream, under ``token``. ``taken_from`` is the dead previous owner, if there was one."""

    kind = 1
    taken_from: str | None = None


@dataclass(frozen=True, slots=True)
class StreamDisowned(Notification):
    """This member no longer owns the stream: stop working on it. ``token`` is the one that is no longer valid."""

    kind = 2


@dataclass(frozen=True, slots=True)
class StreamExpired(Notification):
    """The lease of another member has expired: ``claim`` the stream to take it over. Sent if ``takeover="notify"``."""

    kind = 3


@dataclass(frozen=True, slots=True)
class StreamTerminated(Notification):
    """The stream is finished: it is no longer announced, and has no owner."""

    kind = 4


class Notifications:
    """The notifications of a member: ``async for notification in client.start()``.

    ``notifications = await client.start()`` returns when the member has joined and has scanned for streams once. A
    permanent error (a wrong password, no permission, a key of another type) is raised there, or else by the iterator.
    While the server cannot be reached, both wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[Notification] = deque()
        self._arrived = asyncio.Event()
        self._begun = asyncio.Event()
        self._failure: MillstreamError | None = None
        self._closed = False
        self._handling = False
        """The iterator has returned a notification, and the next one was not requested yet."""
        self._joined = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, notification: Notification) -> None:
        """Queues a notification. Raises MemberClosed after ``close``: the iterator may have ended already."""
        if self._closed:
            raise MemberClosed("the notifications of this member are closed.")
        self._waiting.append(notification)
        self._arrived.set()

    def begin(self) -> None:
        """Called when the member has joined and has scanned for streams once."""
        self._begun.set()

    def fail(self, error: MillstreamError) -> None:
        """Called when the member could not join: raises the error in the tasks that wait for it."""
        self._failure = error
        self._begun.set()
        self._arrived.set()

    def close(self) -> None:
        """Ends the queue: no more notifications follow. Queued ones can still be received."""
        self._closed = True
        self._begun.set()
        self._arrived.set()
        self._check_joined()

    async def join(self) -> None:
        """Waits until the member is closed and every queued notification is handled.

        A notification is handled when the next one is requested from the iterator. So ``join`` does not return unless a
        loop iterates, and it must not be called inside of that loop.
        """
        await self._joined.wait()

    def _check_joined(self) -> None:
        if self._closed and not self._waiting and not self._handling:
            self._joined.set()

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
        self._handling = False
        self._check_joined()
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        self._handling = True
        return self._waiting.popleft()
