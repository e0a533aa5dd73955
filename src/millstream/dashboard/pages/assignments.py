"""Who owns which stream, since when, with which token; what changed hands; and taking a stream from its owner."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from millstream.assignment import Assignment, assignments, balancer_stream, force_release
from millstream.dashboard.render import Query, address, clock, name_word, time_of
from millstream.dashboard.shared import Action, Outcome, Question, Shared, Values, WebPage
from millstream.errors import NoSuchStream
from millstream.observe import duration

ROWS = 100
MOST = 10_000
"""Announcements that are looked at."""
TAKEOVERS = 200
SUFFIX = "-input"


class TakeOver(NamedTuple):
    """A stream's owner from a moment on; ``before`` is empty where it is not known."""

    at_ms: int
    when: str
    stream: str
    before: str
    owner: str
    token: int


class _Seen:
    """What was seen of one service so far: its owners, and the changes between two looks."""

    def __init__(self) -> None:
        self.owners: dict[str, tuple[int, str]] = {}
        self.changes: deque[TakeOver] = deque(maxlen=TAKEOVERS)
        self.rows: Sequence[Assignment] = ()
        self.at = -1

    def note(self, rows: Sequence[Assignment], now_ms: int) -> None:
        for one in rows:
            token, owner = self.owners.get(one.stream, (0, ""))
            if one.token != token or one.owner != owner:
                # Where there is an owner, the token is the moment at which its lease began.
                at_ms = one.token if one.owner else now_ms
                if one.owner or owner:
                    change = TakeOver(at_ms, clock(at_ms), one.stream, owner, one.owner, one.token)
                    self.changes.append(change)
        self.owners = {one.stream: (one.token, one.owner) for one in rows}
        self.rows = rows


def services(shared: Shared) -> list[str]:
    """Services that have announced something: their load-balancer streams have a group of their name."""
    found = []
    for name, one in shared.survey.streams.items():
        service = name.removesuffix(SUFFIX)
        if name == balancer_stream(service) and any(group.name == f"{service}-group" for group in one.groups):
            found.append(service)
    return sorted(found)


async def load(shared: Shared, query: Query, root: str) -> Values:
    await shared.survey.wanted()
    known = services(shared)
    service = query.name("service") or (known[0] if known else None)
    values: Values = {"services": known, "service": service, "problem": "", "total": 0, "owned": 0, "rows": []}
    values |= {"members": [], "takeovers": [], "before": None, "after": None, "first": 0, "last": 0}
    if service is None:
        return values
    if balancer_stream(service) not in shared.survey.streams:
        return values | {"problem": f"The service {service} has announced nothing (any more)."}
    kept = shared.remembered.setdefault("assignments", {})
    seen = kept.setdefault(service, _Seen())
    now_ms = await shared.broker.server_time_ms()
    if seen.at != shared.survey.at:
        seen.at = shared.survey.at
        seen.note(await run_in_threadpool(assignments, shared.blocking, service, most=MOST), now_ms)
    rows = seen.rows
    skip = query.number("skip", 0, most=MOST)
    owners = Counter(one.owner for one in rows if one.owner)
    alive = {one.owner for one in rows if one.alive}

    def at(position: int) -> str:
        skipped = str(position) if position else ""
        return root + address("/assignments", [("service", name_word(service)), ("skip", skipped)])

    shown = rows[skip : skip + ROWS]
    return values | {
        "total": len(rows),
        "owned": sum(owners.values()),
        "members": [{"name": name, "count": n, "alive": name in alive} for name, n in owners.most_common(100)],
        "rows": [
            {
                "stream": one.stream,
                "owner": one.owner,
                "alive": one.alive,
                "token": one.token,
                "since": f"{duration(max(0, now_ms - one.token))} ago" if one.owner else "",
                "announced": time_of(one.lbs_id) or str(one.lbs_id),
                "release": root
                + address("/assignments/release", [("service", name_word(service)), ("name", name_word(one.stream))]),
            }
            for one in shown
        ],
        "takeovers": sorted(seen.changes, reverse=True),
        "before": at(max(0, skip - ROWS)) if skip else None,
        "after": at(skip + ROWS) if skip + ROWS < len(rows) else None,
        "first": skip + 1 if shown else 0,
        "last": skip + len(shown),
    }


async def ask(shared: Shared, query: Query, root: str) -> Question:
    service, stream = query.name("service"), query.name("name")
    found = await run_in_threadpool(assignments, shared.blocking, service, most=MOST)
    back = root + address("/assignments", [("service", name_word(service))])
    hidden = [("service", name_word(service)), ("name", name_word(stream))]
    one = next((one for one in found if one.stream == stream), None)
    if one is None:
        return Question("Release a stream", f"{stream} is not announced (any more).", "", back, hidden, possible=False)
    touches = [("stream", stream), ("owner", one.owner or "nobody"), ("token", str(one.token))]
    question = f"Take {stream} from its owner, and let another member have it? What the owner still writes is refused."
    return Question("Release a stream", question, "Release", back, hidden, touches=touches, dangerous=True)


async def act(shared: Shared, query: Query) -> Outcome:
    service, stream = query.name("service"), query.name("name")
    try:
        owner = await run_in_threadpool(force_release, shared.blocking, service, stream)
    except NoSuchStream as problem:
        return Outcome(str(problem), fine=False)
    return Outcome(f"{stream} was taken from {owner}." if owner else f"Nobody owned {stream}.")


def tell(query: Query) -> str:
    return f"release {query.name('name')} of service {query.name('service')}"


PAGES = (WebPage("/assignments", "assignments.html", "/assignments", load),)
ACTIONS = (Action("/assignments/release", "/assignments", ask, act, tell),)
