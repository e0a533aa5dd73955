"""Live updates of open pages: server-sent events over one connection for all tabs of a browser.

The live parts of a page are rendered once per reading of the stream stats, for all clients that have it open. New
entries are read once per stream, for all its followers.

Everything is bounded: the connections, the pages and streams per connection, and the age of a connection. A slow client
receives only the latest state of a page; intermediate updates are skipped. Entries that are dropped for a slow client
are counted, and the count is sent to it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from millstream.broker import Broker
from millstream.dashboard.entries import read_page
from millstream.dashboard.render import encode_name
from millstream.dashboard.shared import LiveStats
from millstream.errors import MillstreamError
from millstream.model import Entry, EntryId

log = logging.getLogger("millstream.dashboard")

MAX_FOLLOWED_STREAMS = 20
MAX_MISSED_ENTRIES = 100
"""Entries that a new follower receives if it missed some; of more, the newest."""
MAX_QUEUED_ENTRIES = 200
MAX_ENTRIES_PER_READ = 20
MAX_BYTES_PER_READ = 8 << 20
"""Limits the COUNT of a read, by the average size of the entries of the last read. One entry is always read."""
BLOCK_MS = 1_000
RETRY_AFTER_S = 1.0


class RenderedEntry(NamedTuple):
    """An entry as HTML, rendered once for all followers of its stream."""

    id: EntryId
    html: str


class Follower:
    """One connection's queue of new entries of a stream. ``arrived`` is set when the queue is not empty."""

    def __init__(self, after: EntryId, arrived: asyncio.Event) -> None:
        self.last = after
        self._arrived = arrived
        self._queue: deque[RenderedEntry] = deque()
        self._skipped = 0

    def add(self, entries: Sequence[RenderedEntry], skipped: int = 0) -> None:
        self._skipped += skipped
        for entry in entries:
            if entry.id > self.last:
                self.last = entry.id
                self._queue.append(entry)
        while len(self._queue) > MAX_QUEUED_ENTRIES:
            self._queue.popleft()
            self._skipped += 1
        if self._queue:
            self._arrived.set()

    def take(self) -> tuple[list[RenderedEntry], int]:
        """Remove and return the queued entries, and the number of entries that were dropped before them."""
        entries, skipped = list(self._queue), self._skipped
        self._queue.clear()
        self._skipped = 0
        return entries, skipped


class _Reader:
    """Reads one stream for all its followers. A new follower first reads what it missed, by itself."""

    def __init__(self, broker: Broker, stream: str, render: Callable[[Entry], str]) -> None:
        self._broker = broker
        self._stream = stream
        self._render = render
        self._cursor: EntryId | None = None
        self._count = 1
        self.followers: set[Follower] = set()
        self.joining = 0
        """Followers that are still reading what they missed. The reader stays registered for them."""
        self.task: asyncio.Task[None] | None = None

    async def join(self, follower: Follower) -> None:
        missed = await read_page(
            self._broker, self._stream, "", oldest_first=False, limit=MAX_MISSED_ENTRIES, until=f"({follower.last}"
        )
        skipped = 0 if missed.next_id is None else 1  # at least: older ones are not counted
        rendered = [RenderedEntry(entry.id, self._render(entry)) for entry in reversed(missed.entries)]
        # No await from here to the end: otherwise entries that the reader receives meanwhile would miss the follower.
        follower.add(rendered, skipped)
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
                reply = await self._broker.xread(read, count=self._count, block_ms=BLOCK_MS)
            except MillstreamError:
                await asyncio.sleep(RETRY_AFTER_S)  # the stream stats report that the server is unreachable
                continue
            except Exception:  # of any kind: the reader serves all followers
                log.exception("dashboard: reading stream %s failed with an unexpected error; retrying", self._stream)
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            if entries := reply.get(self._stream):
                self._cursor = entries[-1].id
                size = sum(len(name) + len(value) for entry in entries for name, value in entry.fields.items())
                self._count = max(1, min(MAX_ENTRIES_PER_READ, MAX_BYTES_PER_READ * len(entries) // max(1, size)))
                self._distribute(entries)
        self.task = None

    def _distribute(self, entries: Sequence[Entry]) -> None:
        try:
            rendered = [RenderedEntry(entry.id, self._render(entry)) for entry in entries]
        except Exception:  # an entry can hold anything; the reader serves all followers
            log.exception("dashboard: entries of stream %s cannot be rendered; skipping them", self._stream)
            return
        for follower in self.followers:
            follower.add(rendered)


class Tails:
    """The streams that pages follow: one reader per stream, shared by all its followers."""

    def __init__(self, broker: Broker, render: Callable[[Entry], str]) -> None:
        self._broker = broker
        self._render = render
        self._readers: dict[str, _Reader] = {}

    async def follow(self, stream: str, after: EntryId, arrived: asyncio.Event) -> Follower | None:
        """Return a follower of new entries; None if too many streams are followed already."""
        reader = self._readers.get(stream)
        if reader is None:
            if len(self._readers) >= MAX_FOLLOWED_STREAMS:
                return None
            reader = self._readers[stream] = _Reader(self._broker, stream, self._render)
        follower = Follower(after, arrived)
        reader.joining += 1
        try:
            await reader.join(follower)
        finally:
            reader.joining -= 1
            self._remove_if_unused(stream, reader)
        return follower

    def leave(self, stream: str, follower: Follower) -> None:
        reader = self._readers.get(stream)
        if reader is not None:
            reader.followers.discard(follower)
            self._remove_if_unused(stream, reader)

    def _remove_if_unused(self, stream: str, reader: _Reader) -> None:
        if not reader.followers and not reader.joining and self._readers.get(stream) is reader:
            del self._readers[stream]  # its task ends after the current read

    async def close(self) -> None:
        tasks = [reader.task for reader in self._readers.values() if reader.task is not None]
        self._readers = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MAX_CONNECTIONS = 250
MAX_PAGES_PER_CONNECTION = 32
MAX_TAILS_PER_CONNECTION = 8
HEARTBEAT_S = 15.0
MAX_CONNECTION_AGE_S = 3600.0
"""Then the browser reconnects and its session is checked again, so an expired session loses its live updates."""


class RenderedPage(NamedTuple):
    """The live parts of a page for one version of the stream stats. ``failed``: the page could not be rendered."""

    version: int
    parts: dict[str, str]
    failed: bool


class _OpenPage:
    """A page that at least one client has open, and its latest rendering."""

    def __init__(self) -> None:
        self.readers = 0
        self.lock = asyncio.Lock()
        self.rendered: RenderedPage | None = None


MakeParts = Callable[[str, str], Awaitable[dict[str, str] | None]]
"""Returns the live parts of a page for its address and the root path; None if the page has none."""


class Feed:
    """Produces the event streams of all connections."""

    def __init__(self, stats: LiveStats, tails: Tails, make_parts: MakeParts) -> None:
        self._stats = stats
        self._tails = tails
        self._make_parts = make_parts
        self._open_pages: dict[str, _OpenPage] = {}
        self.connections = 0
        self._wake_ups: set[asyncio.Event] = set()
        self._ended = False

    def end(self) -> None:
        """End all current and future event streams. Otherwise the web server would wait for them when it stops."""
        self._ended = True
        for wake_up in self._wake_ups:
            wake_up.set()

    @property
    def is_full(self) -> bool:
        return self.connections >= MAX_CONNECTIONS

    async def events(
        self, pages: Sequence[str], tails: Sequence[tuple[str, EntryId]], root: str
    ) -> AsyncIterator[bytes]:
        """Yield the events of one connection until the client leaves, ``end`` is called or its age limit is reached."""
        self.connections += 1
        followed: dict[str, Follower] = {}
        wake_up = asyncio.Event()
        for page in pages:
            self._open_pages.setdefault(page, _OpenPage()).readers += 1
        try:
            self._wake_ups.add(wake_up)
            with self._stats.notify(wake_up):
                await self._stats.request()
                async for event in self._generate(pages, dict(tails), followed, wake_up, root):
                    yield event
        finally:
            self.connections -= 1
            self._wake_ups.discard(wake_up)
            for stream, follower in followed.items():
                self._tails.leave(stream, follower)
            for page in pages:
                page_state = self._open_pages[page]
                page_state.readers -= 1
                if not page_state.readers:
                    del self._open_pages[page]

    async def _generate(
        self,
        pages: Sequence[str],
        requested: dict[str, EntryId],
        followed: dict[str, Follower],
        wake_up: asyncio.Event,
        root: str,
    ) -> AsyncIterator[bytes]:
        sent: dict[str, RenderedPage] = {}
        state: dict[str, Any] = {}
        version = 0
        until = time.monotonic() + MAX_CONNECTION_AGE_S
        while time.monotonic() < until:
            wake_up.clear()
            if self._ended:
                return
            if state != (state := self._state()):
                yield _event("connection", state)
            for stream in [name for name in requested if name not in followed]:
                try:
                    follower = await self._tails.follow(stream, requested[stream], wake_up)
                except MillstreamError:
                    continue  # retried after the next reading
                except Exception:  # of any kind: one stream must not end the connection that all tabs share
                    log.exception("dashboard: stream %s cannot be followed because of an unexpected error", stream)
                    del requested[stream]
                    continue
                if follower is not None:
                    followed[stream] = follower
                else:
                    del requested[stream]
            for stream, follower in followed.items():
                entries, skipped = follower.take()
                if entries:
                    yield _tail(stream, entries, skipped)
            if version != (version := self._stats.version):
                for page in pages:
                    rendered = await self._render_page(page, root)
                    event = _page(page, rendered, sent.get(page))
                    sent[page] = rendered
                    if event is not None:
                        yield event
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await wake_up.wait()
            except TimeoutError:
                yield b": keep-alive\n\n"

    def _state(self) -> dict[str, Any]:
        if self._stats.away is not None:
            return {"state": "away", "text": self._stats.away}
        return {"state": "live", "text": ""}

    async def _render_page(self, page: str, root: str) -> RenderedPage:
        """Return the page for the latest stream stats, rendering it if no other connection has done so."""
        page_state = self._open_pages[page]
        async with page_state.lock:
            version = self._stats.version
            if page_state.rendered is None or page_state.rendered.version != version:
                try:
                    parts = await self._make_parts(page, root)
                    page_state.rendered = RenderedPage(version, parts or {}, failed=False)
                except MillstreamError:
                    page_state.rendered = RenderedPage(version, {}, failed=True)
                except Exception:  # one page must not end the connection that all tabs of a browser share
                    log.exception("dashboard: page %s failed with an unexpected error; retrying", page)
                    page_state.rendered = RenderedPage(version, {}, failed=True)
            return page_state.rendered


def _event(kind: str, data: Any) -> bytes:
    # JSON escapes line ends, and ASCII avoids unpaired surrogates: an event is always two lines, whatever a name holds.
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def _page(page: str, rendered: RenderedPage, sent: RenderedPage | None) -> bytes | None:
    """The event with the parts that changed since ``sent``; None if nothing changed."""
    sent_parts = sent.parts if sent is not None else {}
    changed = {id: html for id, html in rendered.parts.items() if sent_parts.get(id) != html}
    if sent is not None and not changed and rendered.failed == sent.failed:
        return None
    return _event("page", {"address": page, "parts": changed, "reload": not rendered.failed})


def _tail(stream: str, entries: Sequence[Any], skipped: int) -> bytes:
    items = [{"id": str(entry.id), "html": entry.html} for entry in entries]
    data = {"name": encode_name(stream), "entries": items, "skipped": skipped, "last": str(entries[-1].id)}
    return _event("tail", data)
