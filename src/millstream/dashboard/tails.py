"""New entries as they arrive, for all who follow a stream: one reader a stream, however many look.

Bounded: so many streams at a time, so many entries held for one who is slow; what is dropped is counted and told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millstream.broker import Broker
from millstream.dashboard.entries import read_page
from millstream.errors import MillstreamError
from millstream.model import Entry, EntryId

MOST_STREAMS = 20
CATCH_UP = 100
"""Entries that one who comes late is given; of more, the latest."""
HELD = 200
AT_A_TIME = 20
READ_BYTES = 8 << 20
"""Entries may be large: of one read there are as many as fit in here by the size of the last, and one at least."""
BLOCK_MS = 1_000
REST_S = 1.0


class Shown(NamedTuple):
    id: EntryId
    html: str


class Follower:
    """One who follows: what has arrived and was not taken yet. ``arrived`` is set when there is something."""

    def __init__(self, after: EntryId, arrived: asyncio.Event) -> None:
        self.last = after
        self._arrived = arrived
        self._held: deque[Shown] = deque()
        self._skipped = 0

    def give(self, entries: Sequence[Shown], skipped: int = 0) -> None:
        self._skipped += skipped
        for one in entries:
            if one.id > self.last:
                self.last = one.id
                self._held.append(one)
        while len(self._held) > HELD:
            self._held.popleft()
            self._skipped += 1
        if self._held:
            self._arrived.set()

    def take(self) -> tuple[list[Shown], int]:
        """What has arrived, and how many were dropped before it."""
        taken, skipped = list(self._held), self._skipped
        self._held.clear()
        self._skipped = 0
        return taken, skipped


class _Reader:
    """Reads one stream for its followers, from the latest of their places on: each catches up to it by itself."""

    def __init__(self, broker: Broker, stream: str, render: Callable[[Entry], str]) -> None:
        self._broker = broker
        self._stream = stream
        self._render = render
        self._cursor: EntryId | None = None
        self._count = 1
        self.followers: set[Follower] = set()
        self.task: asyncio.Task[None] | None = None

    async def join(self, follower: Follower) -> None:
        missed = await read_page(
            self._broker, self._stream, "", oldest_first=False, most=CATCH_UP, until=f"({follower.last}"
        )
        skipped = 0 if missed.next_id is None else 1  # or more: they are not counted
        shown = [Shown(one.id, self._render(one)) for one in reversed(missed.entries)]
        # Nothing is awaited between here and the end: what the reader finds from now on, the follower is given.
        follower.give(shown, skipped)
        self.followers.add(follower)
        if self._cursor is None or follower.last < self._cursor:
            self._cursor = follower.last
        if self.task is None:
            self.task = asyncio.create_task(self._read(), name="millstream dashboard tail")

    async def _read(self) -> None:
        while self.followers:
            assert self._cursor is not None
            try:
                read = {self._stream: self._cursor}
                found = (await self._broker.xread(read, count=self._count, block_ms=BLOCK_MS)).get(self._stream, [])
            except MillstreamError:
                await asyncio.sleep(REST_S)  # the survey tells that the server is away
                continue
            if found:
                self._cursor = found[-1].id
                weight = sum(len(name) + len(value) for one in found for name, value in one.fields.items())
                self._count = max(1, min(AT_A_TIME, READ_BYTES * len(found) // max(1, weight)))
                shown = [Shown(one.id, self._render(one)) for one in found]
                for follower in self.followers:
                    follower.give(shown)
        self.task = None


class Tails:
    def __init__(self, broker: Broker, render: Callable[[Entry], str]) -> None:
        self._broker = broker
        self._render = render
        self._readers: dict[str, _Reader] = {}

    async def follow(self, stream: str, after: EntryId, arrived: asyncio.Event) -> Follower | None:
        """None where too many streams are followed already. Raises what the broker raises."""
        reader = self._readers.get(stream)
        if reader is None:
            if len(self._readers) >= MOST_STREAMS:
                return None
            reader = self._readers[stream] = _Reader(self._broker, stream, self._render)
        follower = Follower(after, arrived)
        try:
            await reader.join(follower)
        finally:
            if not reader.followers and self._readers.get(stream) is reader:
                del self._readers[stream]
        return follower

    def leave(self, stream: str, follower: Follower) -> None:
        reader = self._readers.get(stream)
        if reader is not None:
            reader.followers.discard(follower)
            if not reader.followers:
                del self._readers[stream]  # its task ends with the read that is under way

    async def close(self) -> None:
        tasks = [reader.task for reader in self._readers.values() if reader.task is not None]
        self._readers = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
