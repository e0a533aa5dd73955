"""What all pages share: the brokers, the survey, the notes of what was done, and the processes that run pipelines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millstream.broker import BlockingBroker, Broker
from millstream.dashboard.addresses import Query
from millstream.dashboard.audit import Audit
from millstream.dashboard.survey import LiveSurvey
from millstream.observe import PipelineClient


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
