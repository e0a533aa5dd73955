"""What all pages share: the brokers, the processes that run pipelines, one survey of the server, and the notes of what
was done from a page.

The survey looks while somebody looks, and everybody is shown the same look. A look is followed by a rest that grows
with what the look cost, so that a server with many streams is not kept busy by being watched. When nobody has looked
for a while, it ends by itself, and the next page starts it again.

A note says who, what, when, and how it ended, in a bounded stream of the broker itself. It is written before anything
is done: what cannot be noted is not done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from millstream.broker import BlockingBroker, Broker, StreamSurvey, beside
from millstream.dashboard.render import Query
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.observe import Finding, Look, PipelineClient, Row, Severity, examine_server, examine_stream, look, rows
from millstream.wire import to_name

PAUSE_S = 2.0
SHARE = 0.02
"""Of a core, at most, that looking costs: a look that took a second is followed by a rest of fifty."""
LONGEST_REST_S = 60.0
LEAVE_AFTER_S = 30.0
MEMORY_EVERY = 10
"""Looks between two that ask for memory, which costs the server most."""
EXAMINE_EVERY_S = 30.0
EXAMINED = 10
"""Streams in most need, whose examination is part of a look at everything."""
REMEMBERED = 60
"""Looks that a curve shows."""
MOST_CURVES = 2_000
"""Streams, and groups, that have one: those in most need."""
AUDIT_STREAM = "millstream.audit"
MOST = 10_000
_TEXT = 2_000


class StreamFinding(NamedTuple):
    """A finding of ``doctor``, and the stream that it is about (empty: the server)."""

    level: Severity
    what: str
    found: str
    remedy: str
    stream: str = ""

    @classmethod
    def of(cls, finding: Finding, stream: str = "") -> StreamFinding:
        return cls(finding.level, finding.what, finding.found, finding.remedy, stream)


class Curves:
    """Numbers over time, by name; what was not seen in a look is forgotten."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, ...], deque[float | None]] = {}

    def add(self, points: dict[tuple[str, ...], float | None]) -> None:
        for key in self._points.keys() - points.keys():
            del self._points[key]
        for key, point in points.items():
            if key not in self._points:
                self._points[key] = deque(maxlen=REMEMBERED)
            self._points[key].append(point)

    def of(self, *key: str) -> Sequence[float | None]:
        return tuple(self._points.get(key, ()))


class LiveSurvey:
    """``at`` grows with every look, good or bad; ``wait`` returns when it has."""

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
        self.leave_after_s = LEAVE_AFTER_S
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._listeners: set[asyncio.Event] = set()
        self._wanted_at = float("-inf")
        self._examining: asyncio.Task[None] | None = None
        self._examined: dict[str, tuple[float, list[StreamFinding]]] = {}
        """When, and what was bad, by stream; the server's under no name."""
        self._needy: list[str] = []
        self._asked_for: dict[str, float] = {}
        self._looks = 0
        self.at = 0
        self.look: Look | None = None
        self.before: Look | None = None
        self.rows: list[Row] = []
        self.streams: dict[str, StreamSurvey] = {}
        self.rates = Curves()
        self.lags = Curves()
        self.away: str | None = None
        """Why the server could not be asked; None while it answers."""

    # --- who looks ---------------------------------------------------------------------------------------------------

    async def wanted(self) -> None:
        """Somebody looks. Returns when there is something to show, be it that the server is away."""
        self._wanted_at = self._now()
        if self._task is None or self._task.done() or self._task.get_loop() is not asyncio.get_running_loop():
            self.at = 0
            self._task = asyncio.create_task(self._run(), name="millstream dashboard survey")
        if self.at == 0:
            await self.wait(0)

    async def wait(self, seen: int) -> int:
        """Until there is a look later than ``seen``; its number."""
        ticked = asyncio.Event()
        with self.telling(ticked):
            while self.at <= seen:
                ticked.clear()
                await ticked.wait()
        return self.at

    @contextlib.contextmanager
    def telling(self, ticked: asyncio.Event) -> Iterator[None]:
        """Sets the event at every look."""
        self._listeners.add(ticked)
        try:
            yield
        finally:
            self._listeners.discard(ticked)

    @property
    def looking(self) -> bool:
        return any(task is not None and not task.done() for task in (self._task, self._examining))

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._examining) if task is not None]
        self._task = self._examining = None
        own = [task for task in tasks if task.get_loop() is asyncio.get_running_loop()]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)

    # --- looking -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._listeners or self._now() - self._wanted_at < self.leave_after_s:
            began, busy = self._now(), time.thread_time()
            try:
                await self._look()
                self.away = None
            except MillstreamError as problem:
                self.away = f"{problem}"
            self._tick()
            if self.away is None and (self._examining is None or self._examining.done()):
                self._examining = asyncio.create_task(self._examine(), name="millstream dashboard doctor")
            cost = max(time.thread_time() - busy, 0.0)
            rest = max(self._pause_s - (self._now() - began), cost / SHARE, 0.05)
            await asyncio.sleep(min(rest, LONGEST_REST_S))

    def _tick(self) -> None:
        self.at += 1
        for ticked in self._listeners:
            ticked.set()

    async def _look(self) -> None:
        with_memory = self._looks % MEMORY_EVERY == 0
        found = await self._broker.run(look, "*", memory=with_memory, before=self.streams)
        self._looks += 1
        self.before, self.look = self.look, found
        self.rows = rows(found, self.before)
        self.streams = {one.name: one for one in found.streams}
        self._remember()

    def _remember(self) -> None:
        followed = self.rows[:MOST_CURVES]
        self.rates.add({(row.stream,): row.added_per_s for row in followed})
        lags: dict[tuple[str, ...], float | None] = {(row.stream,): row.lag for row in followed}
        for row in followed:
            lags |= {(row.stream, group.name): group.lag for group in self.streams[row.stream].groups[:20]}
        self.lags.add(lags)

    # --- what needs attention ----------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[StreamFinding]:
        """Of the server and of the streams in most need: what is bad, the worst first."""
        found = [one for name in ("", *self._needy) for one in self._examined.get(name, (0.0, []))[1]]
        return sorted(found, key=lambda one: (one.level is not Severity.problem, one.stream))

    @property
    def examined(self) -> bool:
        return "" in self._examined

    def findings_of(self, stream: str) -> list[StreamFinding]:
        """What is bad about one stream; asked for the first time, it is known at one of the next looks."""
        self._asked_for[stream] = self._now()
        return self._examined.get(stream, (0.0, []))[1]

    async def _examine(self) -> None:
        """``doctor`` looks twice, a while apart: at all of them at the same time, and beside the survey."""
        now = self._now()
        self._needy = [row.stream for row in self.rows if row.lag or row.pending or row.dead_letters][:EXAMINED]
        self._asked_for = {name: at for name, at in self._asked_for.items() if now - at < 2 * EXAMINE_EVERY_S}
        asked = list(self._asked_for)[-EXAMINED:]
        wanted = dict.fromkeys(("", *self._needy, *asked))
        self._examined = {name: known for name, known in self._examined.items() if name in wanted}
        due = [name for name in wanted if now - self._examined.get(name, (-1e9, []))[0] >= EXAMINE_EVERY_S]
        if due:
            found = await asyncio.gather(*(run_in_threadpool(self._doctor, name) for name in due))
            self._examined |= {
                name: (self._now(), bad) for name, bad in zip(due, found, strict=True) if bad is not None
            }
            self._tick()

    def _doctor(self, stream: str) -> list[StreamFinding] | None:
        """What is bad about a stream, or (without a name) about the server; None where it cannot be told now."""
        try:
            found = examine_stream(self._blocking, stream) if stream else examine_server(self._blocking)
        except MillstreamError:
            return None  # gone, or the server is away: the survey tells
        return [StreamFinding.of(one, stream) for one in found if one.level in (Severity.warning, Severity.problem)]


def dead_letters_of(stream: str) -> str:
    """The name of the dead-letter stream beside a stream; empty where it can have none."""
    try:
        return to_name(beside(stream, "dlq"))
    except InvalidArgument:
        return ""


class Note(NamedTuple):
    who: str
    what: str
    outcome: str
    fine: bool

    @classmethod
    def read(cls, entry: Entry) -> Note:
        def text(name: bytes) -> str:
            return entry.fields.get(name, b"").decode("utf-8", "surrogateescape")

        return cls(text(b"who"), text(b"what"), text(b"outcome"), text(b"state") == "done")


class Audit:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def begin(self, who: str, what: str) -> EntryId:
        return await self._add({"who": who, "what": what, "state": "begun"})

    async def end(self, begun: EntryId, who: str, what: str, outcome: str, *, fine: bool) -> EntryId:
        state = "done" if fine else "failed"
        return await self._add({"who": who, "what": what, "state": state, "outcome": outcome, "begun": str(begun)})

    async def note(self, id: EntryId) -> tuple[EntryId, Note] | None:
        found = await self._broker.xrange(AUDIT_STREAM, id, id)
        return (found[0].id, Note.read(found[0])) if found else None

    async def _add(self, fields: dict[str, str]) -> EntryId:
        known = {name: value[:_TEXT] for name, value in fields.items()}
        return await self._broker.xadd(AUDIT_STREAM, known, trim=TrimPolicy(max_len=MOST, approximate=True))


@dataclass(slots=True)
class Shared:
    """The blocking broker is for what the command line does in threads: examinations, and the assignments."""

    broker: Broker
    blocking: BlockingBroker
    survey: LiveSurvey
    audit: Audit
    pipelines: Sequence[PipelineClient] = ()
    remembered: dict[str, Any] = field(default_factory=dict)
    """What a page keeps from one look to the next, under its own name."""


Values = dict[str, Any]
Load = Callable[[Shared, Query, str], Awaitable[Values]]
"""What a template shows: made from the parameters of an address, under a root. Raises MillstreamError."""


class WebPage(NamedTuple):
    """``section`` is the part of the navigation that it belongs to. ``live``: its parts are sent anew while open."""

    path: str
    template: str
    section: str
    load: Load
    live: bool = True


class Action(NamedTuple):
    """Something to be done: what is asked first, and how it is done."""

    path: str
    section: str
    ask: Callable[[Shared, Query, str], Awaitable[Question]]
    act: Callable[[Shared, Query], Awaitable[Outcome]]
    tell: Callable[[Query], str]
    """What is noted of it before it is done."""


class Question(NamedTuple):
    """``hidden`` comes back with the answer, so that what is done is what was asked."""

    title: str
    question: str
    word: str
    back: str
    hidden: Sequence[tuple[str, str]]
    touches: Sequence[tuple[str, str]] = ()
    warning: str = ""
    dangerous: bool = False
    possible: bool = True


class Outcome(NamedTuple):
    sentence: str
    fine: bool = True
