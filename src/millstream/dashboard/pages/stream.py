"""One stream: how it stands, who reads it and what they hold, its entries, a search in them, new ones as they come."""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.broker import survey as one_survey
from millstream.dashboard.entries import EntryPage, parse_start, read_page, search, view
from millstream.dashboard.render import Query, address, name_word
from millstream.dashboard.shared import Shared, Values, WebPage, dead_letters_of
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, NoSuchStream, WrongKeyType
from millstream.model import EntryId, GroupInfo
from millstream.observe import holding_group, made_at, size

MOST_GROUPS = 50
MOST_CONSUMERS = 100
GONE = "There is no such stream (any more). It is made by the first entry: this page shows it then."


class ConsumerRow(NamedTuple):
    """``oldest_ms``: since when the oldest of what it holds was handed out last."""

    name: str
    pending: int
    idle_ms: int
    oldest_id: EntryId | None
    oldest_ms: int | None


class GroupRow(NamedTuple):
    name: str
    lag: int | None
    pending: int
    last_delivered: EntryId
    oldest_ms: int | None
    consumers: list[ConsumerRow]
    lags: Any


async def load(shared: Shared, query: Query, root: str) -> Values:
    name = query.name("name")
    await shared.survey.wanted()
    values: Values = {**_addresses(name, query), "gone": "", "groups": [], "trimming": None, "findings": []}
    values |= {"facts": None, "memory": None, "rate": None, "rates": (), "dead_letters": 0, "more_consumers": 0}
    values |= {
        "heavy": "",
        "entries": [],
        "cut": "",
        "onward": None,
        "newest": None,
        "refused": "",
        "tail_after": "0-0",
    }
    values |= {"searched": 0, "search_total": 0, "search_share": 0.0, "search_next": None, "search_on": None}
    try:
        await _facts(shared, name, values)
    except (NoSuchStream, WrongKeyType, InvalidArgument) as problem:
        values["gone"] = GONE if isinstance(problem, NoSuchStream) else str(problem)
    return values


async def load_whole(shared: Shared, query: Query, root: str) -> Values:
    """The page as it is opened: with entries, which are not sent anew."""
    values = await load(shared, query, root)
    if values["gone"]:
        return values
    try:
        start = parse_start(values["start"]) if values["start"] else ""
    except InvalidArgument as problem:
        values["refused"] = str(problem)
        start = ""
    oldest_first = values["order"] == "oldest"
    if values["query"]:
        await _search(shared, values, start, root)
        return values
    try:
        page = await read_page(shared.broker, values["name"], start, oldest_first=oldest_first)
    except BrokerUnavailable as problem:
        if not values["heavy"]:
            raise
        # The server answers what is small: the rest of the page is worth showing.
        values["refused"] = f"The entries are too large to be fetched in time, {values['heavy']} on average: {problem}"
        values["tail_after"] = None
        return values
    now_ms = await shared.broker.server_time_ms()
    values["entries"] = [view(entry, now_ms) for entry in page.entries]
    values["cut"] = page.cut
    values["tail_after"] = str(values["facts"]["last"] or await _last_id(shared, values["name"]))
    kept = [("name", name_word(values["name"])), ("order", "oldest" if oldest_first else "")]
    values["onward"] = _onward(page, kept, root)
    values["newest"] = root + address("/stream", kept) if start else None
    return values


async def _last_id(shared: Shared, name: str) -> EntryId:
    """Of a stream whose entries are too large to be asked for at every look: now one of them is read."""
    newest = await shared.broker.xrevrange(name, count=1)
    return newest[0].id if newest else EntryId(0, 0)


def _onward(page: EntryPage, kept: list[tuple[str, str]], root: str) -> str | None:
    return None if page.next_id is None else root + address("/stream", [*kept, ("from", page.next_id)])


def _addresses(name: str, query: Query) -> Values:
    return {
        "name": name,
        "name_word": name_word(name),
        "query": query.text("q"),
        "start": query.text("from", most=60),
        "order": "oldest" if query.text("order") == "oldest" else "newest",
        "follow": query.text("follow") == "1",
        "dlq": dead_letters_of(name),
    }


async def _facts(shared: Shared, name: str, values: Values) -> None:
    survey = shared.survey
    if not name:
        raise NoSuchStream("no name was given")
    known = survey.streams.get(name)
    if known is None:
        # Made since the last look, or gone: the server knows. It says what is wrong where this is no stream.
        groups = await shared.broker.group_info(name)
        found = await shared.broker.run(one_survey, [name])
        if not found:
            raise NoSuchStream("gone while it was looked at")
        known, length = found[0], found[0].length
    else:
        # How long it is now: whoever opens a page has just done something to the stream, perhaps.
        length = await shared.broker.xlen(name)
        if not length and not await shared.broker.exists(name):
            raise NoSuchStream("gone since the last look")
        groups = await shared.broker.group_info(name)
    first = await shared.broker.xrange(name, count=1) if length and not known.heavy else []
    added = known.entries_added
    values["facts"] = {
        "length": length,
        "entries_added": None if added is None else max(added, length),
        "removed": None if added is None else max(0, added - length),
        "first": first[0].id if first else None,
        "last": known.last_generated,
    }
    row = next((row for row in survey.rows if row.stream == name), None)
    values["memory"] = known.memory_bytes
    values["heavy"] = size((known.memory_bytes or 0) // max(1, length)) if known.heavy else ""
    values["rate"] = row.added_per_s if row else None
    values["rates"] = survey.rates.of(name)
    buried = survey.streams.get(values["dlq"])
    values["dead_letters"] = buried.length if buried else 0
    values["trimming"] = holding_group(known)
    values["groups"], values["more_consumers"] = await _groups(shared, name, groups[:MOST_GROUPS])
    values["findings"] = [one._replace(stream="") for one in survey.findings_of(name)]


async def _groups(shared: Shared, name: str, groups: list[GroupInfo]) -> tuple[list[GroupRow], int]:
    now_ms = await shared.broker.server_time_ms()
    known = shared.survey.streams.get(name)
    oldest = {group.name: group.oldest_pending for group in known.groups} if known else {}
    shown: list[GroupRow] = []
    room = MOST_CONSUMERS
    more = 0
    for group in groups:
        first = oldest.get(group.name)
        busy = sorted(group.consumers, key=lambda one: (-one.pending, one.idle_ms, one.name))
        consumers = [await _consumer(shared, name, group, one) for one in busy[:room]]
        more += len(busy) - len(consumers)
        room -= len(consumers)
        age = max(0, now_ms - first.ms) if first and made_at(first) else None
        lags = shared.survey.lags.of(name, group.name)
        shown.append(GroupRow(group.name, group.lag, group.pending, group.last_delivered, age, consumers, lags))
    return shown, more


async def _consumer(shared: Shared, name: str, group: GroupInfo, one: Any) -> ConsumerRow:
    held = []
    if one.pending:
        try:
            held = await shared.broker.xpending_range(name, group.name, count=1, consumer=one.name)
        except MillstreamError:
            held = []  # gone meanwhile
    first = held[0] if held else None
    return ConsumerRow(
        one.name, one.pending, one.idle_ms, first.id if first else None, first.idle_ms if first else None
    )


async def _search(shared: Shared, values: Values, start: str, root: str) -> None:
    slice = await search_slice(shared, values, start, root)
    total = max(values["facts"]["length"], slice["searched"])
    values |= {"entries": slice["entries"], "searched": slice["searched"], "search_total": total}
    values["search_share"] = min(1.0, slice["searched"] / total) if total else 1.0
    values["search_next"] = slice["next"]
    values["search_on"] = slice["next"].replace("/stream/search?", "/stream?", 1) if slice["next"] else None


async def search_slice(shared: Shared, values: Values, start: str, root: str) -> Values:
    """One slice of a search: what it found, how much it searched, and the address of the next."""
    oldest_first = values["order"] == "oldest"
    found = await search(shared.broker, values["name"], values["query"], start, oldest_first=oldest_first)
    now_ms = await shared.broker.server_time_ms()
    kept = [("name", values["name_word"]), ("q", values["query"]), ("order", values["order"])]
    onward = None if found.next_id is None else root + address("/stream/search", [*kept, ("from", found.next_id)])
    return {"entries": [view(one, now_ms) for one in found.entries], "searched": found.searched, "next": onward}


async def search_on(shared: Shared, query: Query, root: str) -> Values:
    """A later slice, for the script that goes on with a search."""
    values = _addresses(query.name("name"), query)
    return await search_slice(shared, values, parse_start(values["start"]) if values["start"] else "", root)


PAGES = (WebPage("/stream", "stream.html", "/", load),)
