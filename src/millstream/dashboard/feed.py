"""What open pages hear: server-sent events over one connection for all tabs of a browser, and the survey behind them.

A page's live parts are rendered once a look, for everybody who has it open. Bounded: so many connections, so many pages
on one, an hour of life; one who is slow is sent what is true when he reads, not what was true in between.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from millstream.dashboard.addresses import name_word
from millstream.dashboard.survey import LiveSurvey
from millstream.dashboard.tails import Follower, Tails
from millstream.errors import MillstreamError
from millstream.model import EntryId

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
