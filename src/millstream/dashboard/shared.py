"""What all pages share: the brokers, the survey, the processes that run pipelines; and the notes of what was done
from a page: who, what, when, and how it ended, in a bounded stream of the broker itself. A note is written before
anything is done: what cannot be noted is not done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millstream.broker import BlockingBroker, Broker
from millstream.dashboard.render import Query
from millstream.dashboard.survey import LiveSurvey
from millstream.model import Entry, EntryId, TrimPolicy
from millstream.observe import PipelineClient

AUDIT_STREAM = "millstream.audit"
MOST = 10_000
_TEXT = 2_000


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
