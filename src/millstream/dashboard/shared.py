"""State shared by all pages: the brokers, the pipeline clients, the live stream stats, and the audit log.

The stream stats are read while at least one page is open, and all pages show the same reading. The pause after a
reading grows with its cost, so that watching a server with many streams does not keep it busy. If no page has requested
the stats for a while, reading stops; the next request starts it again.

An audit note records who did what, when, and the outcome, in a bounded stream of the broker itself. It is written
before the action starts: an action that cannot be recorded is not executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from millstream.broker import BlockingBroker, Broker, companion_key
from millstream.broker.operations.info import StreamStats
from millstream.dashboard.render import Query
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.observe import Finding, Severity, examine_server, examine_stream
from millstream.observe.pipeline_client import PipelineClient
from millstream.observe.streams import StatsReading, StreamRow, read_all_streams, stream_rows
from millstream.wire import to_name

log = logging.getLogger("millstream.dashboard")

PAUSE_S = 2.0
MAX_CPU_SHARE = 0.02
"""Of one core, for reading stream stats: a reading that took 1 s is followed by a pause of 50 s."""
MAX_PAUSE_S = 60.0
STOP_AFTER_S = 30.0
"""Without a request, reading the stream stats stops after this time."""
READINGS_PER_MEMORY_QUERY = 10
"""Only every tenth reading asks for memory, the most expensive query for the server."""
EXAMINE_EVERY_S = 30.0
MAX_EXAMINED_STREAMS = 10
"""Streams that the overview page examines: those with the largest backlog."""
MAX_POINTS = 60
"""Readings that a chart shows."""
MAX_CHARTED_STREAMS = 2_000
"""Streams whose history is kept: those with the largest backlog."""
AUDIT_STREAM = "millstream.audit"
MAX_AUDIT_NOTES = 10_000
MAX_NOTE_FIELD_LENGTH = 2_000


class StreamFinding(NamedTuple):
    """A finding of ``doctor`` with the stream that it concerns; an empty stream means the server."""

    level: Severity
    what: str
    found: str
    remedy: str
    stream: str = ""

    @classmethod
    def of(cls, finding: Finding, stream: str = "") -> StreamFinding:
        return cls(finding.level, finding.what, finding.found, finding.remedy, stream)


class History:
    """Values over time, by key. A key that is missing from a reading is removed."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, ...], deque[float | None]] = {}

    def add(self, points: dict[tuple[str, ...], float | None]) -> None:
        for key in self._points.keys() - points.keys():
            del self._points[key]
        for key, point in points.items():
            if key not in self._points:
                self._points[key] = deque(maxlen=MAX_POINTS)
            self._points[key].append(point)

    def of(self, *key: str) -> Sequence[float | None]:
        return tuple(self._points.get(key, ()))


class LiveStats:
    """Reads the stream stats while pages are open, and keeps the latest reading for all of them.

    ``version`` increases with every reading, successful or not; ``wait`` returns when it has increased.
    """

    def __init__(
        self,
        broker: Broker,
        blocking: BlockingBroker,
        *,
        pause_s: float = PAUSE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._blocking = blocking
        self._pause_s = pause_s
        self.stop_after_s = STOP_AFTER_S
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._listeners: set[asyncio.Event] = set()
        self._requested_at = float("-inf")
        self._examining: asyncio.Task[None] | None = None
        self._examined: dict[str, tuple[float, list[StreamFinding]]] = {}
        """Time of the examination and its findings, by stream; the empty name stands for the server."""
        self._examined_at_ms: dict[str, int] = {}
        """The same times by the server's clock."""
        self._backlogged: list[str] = []
        self._requested_streams: dict[str, float] = {}
        self._readings = 0
        self.version = 0
        self.latest: StatsReading | None = None
        self.previous: StatsReading | None = None
        self.rows: list[StreamRow] = []
        self.streams: dict[str, StreamStats] = {}
        self.rates = History()
        self.lags = History()
        self.away: str | None = None
        """Why the last reading failed; None if it succeeded."""

    # --- requests ----------------------------------------------------------------------------------------------------

    async def request(self) -> None:
        """Keep reading for a while. Returns after the first reading, even if the server could not be reached."""
        self._requested_at = self._now()
        if self._task is None or self._task.done() or self._task.get_loop() is not asyncio.get_running_loop():
            self.version = 0
            self._task = asyncio.create_task(self._run(), name="millstream dashboard stats")
        if self.version == 0:
            await self.wait(0)

    async def wait(self, version: int) -> int:
        """Wait for a version above ``version``, and return it."""
        updated = asyncio.Event()
        with self.notify(updated):
            while self.version <= version:
                updated.clear()
                await updated.wait()
        return self.version

    @contextlib.contextmanager
    def notify(self, updated: asyncio.Event) -> Iterator[None]:
        """Within the block, set the event after every reading."""
        self._listeners.add(updated)
        try:
            yield
        finally:
            self._listeners.discard(updated)

    @property
    def is_reading(self) -> bool:
        return any(task is not None and not task.done() for task in (self._task, self._examining))

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._examining) if task is not None]
        self._task = self._examining = None
        own = [task for task in tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._listeners or self._now() - self._requested_at < self.stop_after_s:
            began, cpu_before = self._now(), time.thread_time()
            try:
                await self._read()
                self.away = None
            except MillstreamError as error:
                self.away = f"{error}"
            except Exception as error:  # otherwise every page would wait forever for the first reading
                log.exception("dashboard: reading the stream stats failed with an unexpected error; retrying")
                self.away = f"unexpected error ({type(error).__name__}); the log of the dashboard has the traceback"
            self._publish()
            if self.away is None and (self._examining is None or self._examining.done()):
                self._examining = asyncio.create_task(self._examine(), name="millstream dashboard doctor")
            cpu_s = max(time.thread_time() - cpu_before, 0.0)
            pause_s = max(self._pause_s - (self._now() - began), cpu_s / MAX_CPU_SHARE, 0.05)
            await asyncio.sleep(min(pause_s, MAX_PAUSE_S))

    def _publish(self) -> None:
        self.version += 1
        for updated in self._listeners:
            updated.set()

    async def _read(self) -> None:
        with_memory = self._readings % READINGS_PER_MEMORY_QUERY == 0
        reading = await self._broker.run(read_all_streams, "*", memory=with_memory, before=self.streams)
        self._readings += 1
        self.previous, self.latest = self.latest, reading
        self.rows = stream_rows(reading, self.previous)
        self.streams = {stats.name: stats for stats in reading.streams}
        self._add_to_history()

    def _add_to_history(self) -> None:
        charted = self.rows[:MAX_CHARTED_STREAMS]
        self.rates.add({(row.stream,): row.added_per_s for row in charted})
        lags: dict[tuple[str, ...], float | None] = {(row.stream,): row.lag for row in charted}
        for row in charted:
            lags |= {(row.stream, group.name): group.lag for group in self.streams[row.stream].groups[:20]}
        self.lags.add(lags)

    # --- findings ----------------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[StreamFinding]:
        """Warnings and problems of the server and of the streams with the largest backlog, the worst first."""
        findings = [finding for name in ("", *self._backlogged) for finding in self._examined.get(name, (0.0, []))[1]]
        return sorted(findings, key=lambda finding: (finding.level is not Severity.problem, finding.stream))

    @property
    def is_examined(self) -> bool:
        return "" in self._examined

    @property
    def examined_at_ms(self) -> int | None:
        """Server time of the oldest of the ``findings``. The numbers of the streams are newer than that."""
        names = [name for name in ("", *self._backlogged) if self._examined.get(name, (0.0, []))[1]]
        return min((self._examined_at_ms[name] for name in names if name in self._examined_at_ms), default=None)

    def findings_of(self, stream: str) -> list[StreamFinding]:
        """Warnings and problems of one stream. After the first call they are available with a later version."""
        self._requested_streams[stream] = self._now()
        return self._examined.get(stream, (0.0, []))[1]

    async def _examine(self) -> None:
        """Examine what is due, in parallel and in threads: each examination reads twice, a second apart."""
        now = self._now()
        self._backlogged = [
            row.stream for row in self.rows if row.lag or row.pending or row.assigned_streams or row.dead_letters
        ][:MAX_EXAMINED_STREAMS]
        self._requested_streams = {
            name: at for name, at in self._requested_streams.items() if now - at < 2 * EXAMINE_EVERY_S
        }
        requested = list(self._requested_streams)[-MAX_EXAMINED_STREAMS:]
        names = dict.fromkeys(("", *self._backlogged, *requested))
        self._examined = {name: result for name, result in self._examined.items() if name in names}
        due = [name for name in names if now - self._examined.get(name, (-1e9, []))[0] >= EXAMINE_EVERY_S]
        if due:
            at_ms = self.latest.at_ms if self.latest is not None else 0
            results = await asyncio.gather(*(run_in_threadpool(self._doctor, name) for name in due))
            examined = {name: result for name, result in zip(due, results, strict=True) if result is not None}
            self._examined |= {name: (self._now(), result) for name, result in examined.items()}
            self._examined_at_ms |= dict.fromkeys(examined, at_ms)
            self._examined_at_ms = {name: at for name, at in self._examined_at_ms.items() if name in self._examined}
            self._publish()

    def _doctor(self, stream: str) -> list[StreamFinding] | None:
        """Warnings and problems of a stream, or of the server if the name is empty; None if the examination failed."""
        try:
            findings = examine_stream(self._blocking, stream) if stream else examine_server(self._blocking)
        except MillstreamError:
            return None  # the stream was removed or the server is unreachable: the next reading reports it
        except Exception:  # of any kind: the other examinations of this round count
            log.exception("dashboard: examining %s failed with an unexpected error", stream or "the server")
            return None
        urgent = (Severity.warning, Severity.problem)
        return [StreamFinding.of(finding, stream) for finding in findings if finding.level in urgent]


def dead_letter_stream_of(stream: str) -> str:
    """The name of a stream's dead-letter stream; empty if the name does not allow companion keys."""
    try:
        return to_name(companion_key(stream, "dlq"))
    except InvalidArgument:
        return ""


class Note(NamedTuple):
    """An entry of the audit log."""

    who: str
    what: str
    outcome: str
    succeeded: bool

    @classmethod
    def read(cls, entry: Entry) -> Note:
        def text(name: bytes) -> str:
            return entry.fields.get(name, b"").decode("utf-8", "surrogateescape")

        return cls(text(b"who"), text(b"what"), text(b"outcome"), text(b"state") == "done")


class Audit:
    """The audit log: who did what from the dashboard, and with what outcome."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def begin(self, who: str, what: str) -> EntryId:
        return await self._add({"who": who, "what": what, "state": "begun"})

    async def end(self, begun: EntryId, who: str, what: str, outcome: str, *, succeeded: bool) -> EntryId:
        state = "done" if succeeded else "failed"
        return await self._add({"who": who, "what": what, "state": state, "outcome": outcome, "begun": str(begun)})

    async def note(self, id: EntryId) -> tuple[EntryId, Note] | None:
        entries = await self._broker.xrange(AUDIT_STREAM, id, id)
        return (entries[0].id, Note.read(entries[0])) if entries else None

    async def _add(self, fields: dict[str, str]) -> EntryId:
        bounded = {name: value[:MAX_NOTE_FIELD_LENGTH] for name, value in fields.items()}
        return await self._broker.xadd(
            AUDIT_STREAM, bounded, trim=TrimPolicy(max_len=MAX_AUDIT_NOTES, approximate=True)
        )


@dataclass(slots=True)
class Shared:
    """What every page receives. The blocking broker runs in threads: examinations and assignments need it."""

    broker: Broker
    blocking: BlockingBroker
    stats: LiveStats
    audit: Audit
    pipelines: Sequence[PipelineClient] = ()
    page_state: dict[str, Any] = field(default_factory=dict)
    """What a page keeps between readings, under its own name."""


Values = dict[str, Any]
Load = Callable[[Shared, Query, str], Awaitable[Values]]
"""Returns the values of a template for a query string and the root path. Raises MillstreamError."""


class WebPage(NamedTuple):
    """A page. ``section``: its entry in the navigation. ``live``: its live parts are updated while it is open."""

    path: str
    template: str
    section: str
    load: Load
    live: bool = True


class Action(NamedTuple):
    """A confirmed action: ``ask`` returns the question for GET, ``act`` executes the confirmed action for POST."""

    path: str
    section: str
    ask: Callable[[Shared, Query, str], Awaitable[Question]]
    act: Callable[[Shared, Query], Awaitable[Outcome]]
    describe: Callable[[Query], str]
    """Returns the text of the audit note, which is written before the action."""


class Question(NamedTuple):
    """A confirmation page. ``hidden`` is sent back with the confirmation, so that what was shown is executed."""

    title: str
    question: str
    button: str
    back: str
    hidden: Sequence[tuple[str, str]]
    affected: Sequence[tuple[str, str]] = ()
    warning: str = ""
    dangerous: bool = False
    possible: bool = True


class Outcome(NamedTuple):
    """The result of an action, for the audit note and the page after it."""

    text: str
    succeeded: bool = True
