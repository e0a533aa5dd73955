"""What open pages hear: server-sent events over one connection for all tabs of a browser.

A page's live parts are rendered once a look, for everybody who has it open; new entries are read once a stream, however
many follow it. Bounded: so many connections, so many pages and streams on one, an hour of life; one who is slow is sent
what is true when he reads, not what was true in between, and what is dropped of a stream is counted and told.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from millstream.broker import Broker
from millstream.dashboard.entries import read_page
from millstream.dashboard.render import name_word
from millstream.dashboard.shared import LiveSurvey
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


MOST_CONNECTIONS = 250
MOST_PAGES = 32
MOST_TAILS = 8
HEARTBEAT_S = 15.0
LIFE_S = 3600.0
"""Then the browser asks again: a session that is over ends here too."""


class Told(NamedTuple):
    """A page's live parts as of one look. ``failed``: it cannot be made now."""

    at: int
    parts: dict[str, str]
    failed: bool


class _Made:
    """A page that somebody has open, and what it last looked like."""

    def __init__(self) -> None:
        self.readers = 0
        self.making = asyncio.Lock()
        self.told: Told | None = None


MakeParts = Callable[[str, str], Awaitable[dict[str, str] | None]]
"""The live parts of the page at an address, under a root; None where there is nothing live at it."""


class Feed:
    def __init__(self, survey: LiveSurvey, tails: Tails, make_parts: MakeParts) -> None:
        self._survey = survey
        self._tails = tails
        self._make_parts = make_parts
        self._made: dict[str, _Made] = {}
        self.connections = 0
        self._open: set[asyncio.Event] = set()
        self._ended = False

    def end(self) -> None:
        """Ends what is open, and what is opened from now on: a server that stops waits for its last answer."""
        self._ended = True
        for woken in self._open:
            woken.set()

    @property
    def full(self) -> bool:
        return self.connections >= MOST_CONNECTIONS

    async def events(
        self, pages: Sequence[str], tails: Sequence[tuple[str, EntryId]], root: str
    ) -> AsyncIterator[bytes]:
        """The events of one connection, until it ends or has lived long enough."""
        self.connections += 1
        followed: dict[str, Follower] = {}
        woken = asyncio.Event()
        for page in pages:
            self._made.setdefault(page, _Made()).readers += 1
        try:
            self._open.add(woken)
            with self._survey.telling(woken):
                await self._survey.wanted()
                wanted = dict(tails)
                async for event in self._going_on(pages, wanted, followed, woken, root):
                    yield event
        finally:
            self.connections -= 1
            self._open.discard(woken)
            for stream, follower in followed.items():
                self._tails.leave(stream, follower)
            for page in pages:
                made = self._made[page]
                made.readers -= 1
                if not made.readers:
                    del self._made[page]

    async def _going_on(
        self,
        pages: Sequence[str],
        wanted: dict[str, EntryId],
        followed: dict[str, Follower],
        woken: asyncio.Event,
        root: str,
    ) -> AsyncIterator[bytes]:
        sent: dict[str, Told] = {}
        state: dict[str, Any] = {}
        seen = 0
        until = time.monotonic() + LIFE_S
        while time.monotonic() < until:
            woken.clear()
            if self._ended:
                return
            if state != (state := self._state()):
                yield _event("connection", state)
            for stream in [name for name in wanted if name not in followed]:
                try:
                    follower = await self._tails.follow(stream, wanted[stream], woken)
                except MillstreamError:
                    continue  # at the next look again
                if follower is not None:
                    followed[stream] = follower
                else:
                    del wanted[stream]
            for stream, follower in followed.items():
                entries, skipped = follower.take()
                if entries:
                    yield _tail(stream, entries, skipped)
            if seen != (seen := self._survey.at):
                for page in pages:
                    told = await self._told(page, root)
                    event = _page(page, told, sent.get(page))
                    sent[page] = told
                    if event is not None:
                        yield event
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await woken.wait()
            except TimeoutError:
                yield b": still here\n\n"

    def _state(self) -> dict[str, Any]:
        if self._survey.away is not None:
            return {"state": "away", "text": self._survey.away}
        return {"state": "live", "text": ""}

    async def _told(self, page: str, root: str) -> Told:
        """The page as of the last look, made by whoever comes first."""
        made = self._made[page]
        async with made.making:
            at = self._survey.at
            if made.told is None or made.told.at != at:
                try:
                    parts = await self._make_parts(page, root)
                    made.told = Told(at, parts or {}, failed=False)
                except MillstreamError:
                    made.told = Told(at, {}, failed=True)
            return made.told


def _event(kind: str, data: Any) -> bytes:
    # JSON has no line ends of its own, and ASCII no half characters: whatever a name holds, an event is two lines.
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def _page(page: str, told: Told, before: Told | None) -> bytes | None:
    """What has changed since it was last sent; all of it the first time."""
    known = before.parts if before is not None else {}
    changed = {id: html for id, html in told.parts.items() if known.get(id) != html}
    if before is not None and not changed and told.failed == before.failed:
        return None
    return _event("page", {"address": page, "parts": changed, "reload": not told.failed})


def _tail(stream: str, entries: Sequence[Any], skipped: int) -> bytes:
    shown = [{"id": str(one.id), "html": one.html} for one in entries]
    told = {"name": name_word(stream), "entries": shown, "skipped": skipped, "last": str(entries[-1].id)}
    return _event("tail", told)
