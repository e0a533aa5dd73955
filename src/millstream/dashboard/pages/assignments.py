"""The assignments page: the owners of a service's streams, changes of owner, and releasing a stream."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from millstream.assignment import Assignment, assignments, balancer_stream, force_release
from millstream.dashboard.render import Query, address, clock, encode_name, time_of
from millstream.dashboard.shared import Action, Outcome, Question, Shared, Values, WebPage
from millstream.errors import NoSuchStream
from millstream.observe.format import duration

ROWS = 100
MAX_ASSIGNMENTS = 10_000
MAX_TAKEOVERS = 200
SUFFIX = "-input"


class TakeOver(NamedTuple):
    """A change of a stream's owner. ``before``: the previous owner; empty if unknown."""

    at_ms: int
    when: str
    stream: str
    before: str
    owner: str
    token: int


class _ServiceHistory:
    """The owners of one service's streams at the last reading, and the changes between readings."""

    def __init__(self) -> None:
        self.owners: dict[str, tuple[int, str]] = {}
        self.changes: deque[TakeOver] = deque(maxlen=MAX_TAKEOVERS)
        self.rows: Sequence[Assignment] = ()
        self.version = -1

    def update(self, rows: Sequence[Assignment], now_ms: int) -> None:
        for row in rows:
            token, owner = self.owners.get(row.stream, (0, ""))
            if row.token != token or row.owner != owner:
                # The fencing token of a lease is the time at which it began.
                at_ms = row.token if row.owner else now_ms
                if row.owner or owner:
                    change = TakeOver(at_ms, clock(at_ms), row.stream, owner, row.owner, row.token)
                    self.changes.append(change)
        self.owners = {row.stream: (row.token, row.owner) for row in rows}
        self.rows = rows


def services(shared: Shared) -> list[str]:
    """The services that announce streams: the load-balancer stream of a service has a group of its name."""
    names = []
    for name, stats in shared.stats.streams.items():
        service = name.removesuffix(SUFFIX)
        if name == balancer_stream(service) and any(group.name == f"{service}-group" for group in stats.groups):
            names.append(service)
    return sorted(names)


async def load(shared: Shared, query: Query, root: str) -> Values:
    await shared.stats.request()
    service_names = services(shared)
    service = query.name("service") or (service_names[0] if service_names else None)
    values: Values = {"services": service_names, "service": service, "problem": "", "total": 0, "owned": 0, "rows": []}
    values |= {"members": [], "takeovers": [], "before": None, "after": None, "first": 0, "last": 0}
    if service is None:
        return values
    if balancer_stream(service) not in shared.stats.streams:
        return values | {"problem": f"The service {service} has no announced streams."}
    histories = shared.page_state.setdefault("assignments", {})
    history = histories.setdefault(service, _ServiceHistory())
    now_ms = await shared.broker.server_time_ms()
    if history.version != shared.stats.version:
        history.version = shared.stats.version
        history.update(await run_in_threadpool(assignments, shared.blocking, service, limit=MAX_ASSIGNMENTS), now_ms)
    rows = history.rows
    skip = query.number("skip", 0, maximum=MAX_ASSIGNMENTS)
    owners = Counter(row.owner for row in rows if row.owner)
    alive = {row.owner for row in rows if row.alive}

    def at(position: int) -> str:
        skipped = str(position) if position else ""
        return root + address("/assignments", [("service", encode_name(service)), ("skip", skipped)])

    visible = rows[skip : skip + ROWS]
    return values | {
        "total": len(rows),
        "owned": sum(owners.values()),
        "members": [{"name": name, "count": n, "alive": name in alive} for name, n in owners.most_common(100)],
        "rows": [
            {
                "stream": row.stream,
                "owner": row.owner,
                "alive": row.alive,
                "token": row.token,
                "since": f"{duration(max(0, now_ms - row.token))} ago" if row.owner else "",
                "announced": time_of(row.lbs_id) or str(row.lbs_id),
                "release": root
                + address(
                    "/assignments/release", [("service", encode_name(service)), ("name", encode_name(row.stream))]
                ),
            }
            for row in visible
        ],
        "takeovers": sorted(history.changes, reverse=True),
        "before": at(max(0, skip - ROWS)) if skip else None,
        "after": at(skip + ROWS) if skip + ROWS < len(rows) else None,
        "first": skip + 1 if visible else 0,
        "last": skip + len(visible),
    }


async def ask(shared: Shared, query: Query, root: str) -> Question:
    service, stream = query.name("service"), query.name("name")
    rows = await run_in_threadpool(assignments, shared.blocking, service, limit=MAX_ASSIGNMENTS)
    back = root + address("/assignments", [("service", encode_name(service))])
    hidden = [("service", encode_name(service)), ("name", encode_name(stream))]
    row = next((row for row in rows if row.stream == stream), None)
    if row is None:
        return Question("Release a stream", f"{stream} is not announced.", "", back, hidden, possible=False)
    affected = [("stream", stream), ("owner", row.owner or "none"), ("fencing token", str(row.token))]
    question = (
        f"Release {stream} from its owner, so that another member can claim it? The owner's writes will be refused."
    )
    return Question("Release a stream", question, "Release", back, hidden, affected=affected, dangerous=True)


async def act(shared: Shared, query: Query) -> Outcome:
    service, stream = query.name("service"), query.name("name")
    try:
        owner = await run_in_threadpool(force_release, shared.blocking, service, stream)
    except NoSuchStream as error:
        return Outcome(str(error), succeeded=False)
    return Outcome(f"{stream} was released from {owner}." if owner else f"{stream} had no owner.")


def describe(query: Query) -> str:
    return f"release {query.name('name')} of service {query.name('service')}"


PAGES = (WebPage("/assignments", "assignments.html", "/assignments", load),)
ACTIONS = (Action("/assignments/release", "/assignments", ask, act, describe),)
