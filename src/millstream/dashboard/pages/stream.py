"""The page of one stream: its stats, groups and consumers, and its entries with search and live tail."""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.broker.operations.info import read_stream_stats
from millstream.dashboard.entries import EntryPage, parse_start, read_page, search, view
from millstream.dashboard.render import Query, address, encode_name
from millstream.dashboard.shared import Shared, Values, WebPage, dead_letter_stream_of
from millstream.errors import BrokerUnavailable, InvalidArgument, MillstreamError, NoSuchStream, WrongKeyType
from millstream.model import ConsumerInfo, EntryId, GroupInfo
from millstream.observe.format import made_at, size
from millstream.observe.streams import holding_group

MAX_GROUPS = 50
MAX_CONSUMERS = 100
NO_SUCH_STREAM = "This stream does not exist. The first entry creates it; this page will show it then."


class ConsumerRow(NamedTuple):
    """A consumer with its oldest pending entry. ``oldest_ms``: time since the last delivery of that entry."""

    name: str
    pending: int
    idle_ms: int
    oldest_id: EntryId | None
    oldest_ms: int | None


class GroupRow(NamedTuple):
    """A group. ``oldest_ms``: age of its oldest pending entry. ``lags``: the history of its lag."""

    name: str
    lag: int | None
    pending: int
    last_delivered: EntryId
    oldest_ms: int | None
    consumers: list[ConsumerRow]
    lags: Any


async def load(shared: Shared, query: Query, root: str) -> Values:
    name = query.name("name")
    await shared.stats.request()
    values: Values = {**_addresses(name, query), "gone": "", "groups": [], "trimming": None, "findings": []}
    values |= {"facts": None, "memory": None, "rate": None, "rates": (), "dead_letters": 0, "more_consumers": 0}
    values |= {
        "heavy": "",
        "entries": [],
        "cut": "",
        "next_url": None,
        "newest": None,
        "entries_error": "",
        "tail_after": "0-0",
    }
    values |= {"searched": 0, "search_total": 0, "search_share": 0.0, "search_next": None, "continue_url": None}
    try:
        await _add_facts(shared, name, values)
    except (NoSuchStream, WrongKeyType, InvalidArgument) as error:
        values["gone"] = NO_SUCH_STREAM if isinstance(error, NoSuchStream) else str(error)
    return values


async def load_with_entries(shared: Shared, query: Query, root: str) -> Values:
    """The values of the whole page, with the entries. Live updates do not include the entries."""
    values = await load(shared, query, root)
    if values["gone"]:
        return values
    try:
        start = parse_start(values["start"]) if values["start"] else ""
    except InvalidArgument as error:
        values["entries_error"] = str(error)
        start = ""
    oldest_first = values["order"] == "oldest"
    if values["query"]:
        await _search(shared, values, start, root)
        return values
    try:
        page = await read_page(shared.broker, values["name"], start, oldest_first=oldest_first)
    except BrokerUnavailable as error:
        if not values["heavy"]:
            raise
        # Only the read of large entries failed, so the other parts of the page are shown.
        average = values["heavy"]
        values["entries_error"] = f"The entries ({average} on average) are too large to be read in time: {error}"
        values["tail_after"] = None
        return values
    now_ms = await shared.broker.server_time_ms()
    values["entries"] = [view(entry, now_ms) for entry in page.entries]
    values["cut"] = page.cut
    values["tail_after"] = str(values["facts"]["last"] or await _last_id(shared, values["name"]))
    params = [("name", encode_name(values["name"])), ("order", "oldest" if oldest_first else "")]
    values["next_url"] = _next_url(page, params, root)
    values["newest"] = root + address("/stream", params) if start else None
    return values


async def _last_id(shared: Shared, name: str) -> EntryId:
    """Read the last entry of a stream whose entries are too large for the stream stats to read it every time."""
    newest = await shared.broker.xrevrange(name, count=1)
    return newest[0].id if newest else EntryId(0, 0)


def _next_url(page: EntryPage, params: list[tuple[str, str]], root: str) -> str | None:
    return None if page.next_id is None else root + address("/stream", [*params, ("from", page.next_id)])


def _addresses(name: str, query: Query) -> Values:
    return {
        "name": name,
        "encoded_name": encode_name(name),
        "query": query.text("q"),
        "start": query.text("from", max_length=60),
        "order": "oldest" if query.text("order") == "oldest" else "newest",
        "follow": query.text("follow") == "1",
        "dlq": dead_letter_stream_of(name),
    }


async def _add_facts(shared: Shared, name: str, values: Values) -> None:
    stats = shared.stats
    if not name:
        raise NoSuchStream("the URL names no stream")
    stream_stats = stats.streams.get(name)
    if stream_stats is None:
        # The stream was created or removed since the last reading. group_info raises if it is missing or no stream.
        groups = await shared.broker.group_info(name)
        streams = await shared.broker.run(read_stream_stats, [name])
        if not streams:
            raise NoSuchStream("the stream was removed while it was read")
        stream_stats, length = streams[0], streams[0].length
    else:
        # The length is read again: the user may just have changed the stream and expects to see the effect.
        length = await shared.broker.xlen(name)
        if not length and not await shared.broker.exists(name):
            raise NoSuchStream("the stream was removed since the last reading")
        groups = await shared.broker.group_info(name)
    first = await shared.broker.xrange(name, count=1) if length and not stream_stats.heavy else []
    added = stream_stats.entries_added
    values["facts"] = {
        "length": length,
        "entries_added": None if added is None else max(added, length),
        "removed": None if added is None else max(0, added - length),
        "first": first[0].id if first else None,
        "last": stream_stats.last_generated,
    }
    row = next((row for row in stats.rows if row.stream == name), None)
    values["memory"] = stream_stats.memory_bytes
    values["heavy"] = size((stream_stats.memory_bytes or 0) // max(1, length)) if stream_stats.heavy else ""
    values["rate"] = row.added_per_s if row else None
    values["rates"] = stats.rates.of(name)
    dead_letters = stats.streams.get(values["dlq"])
    values["dead_letters"] = dead_letters.length if dead_letters else 0
    values["trimming"] = holding_group(stream_stats)
    values["groups"], values["more_consumers"] = await _groups(shared, name, groups[:MAX_GROUPS])
    values["findings"] = [finding._replace(stream="") for finding in stats.findings_of(name)]


async def _groups(shared: Shared, name: str, groups: list[GroupInfo]) -> tuple[list[GroupRow], int]:
    now_ms = await shared.broker.server_time_ms()
    stats = shared.stats.streams.get(name)
    oldest = (
        {group.name: group.oldest_pending for group in stats.groups if not stats.assigns_streams(group.name)}
        if stats
        else {}
    )
    rows: list[GroupRow] = []
    remaining = MAX_CONSUMERS
    hidden = 0
    for group in groups:
        first = oldest.get(group.name)
        members = sorted(group.consumers, key=lambda info: (-info.pending, info.idle_ms, info.name))
        consumers = [await _consumer(shared, name, group, info) for info in members[:remaining]]
        hidden += len(members) - len(consumers)
        remaining -= len(consumers)
        age = max(0, now_ms - first.ms) if first and made_at(first) else None
        lags = shared.stats.lags.of(name, group.name)
        rows.append(GroupRow(group.name, group.lag, group.pending, group.last_delivered, age, consumers, lags))
    return rows, hidden


async def _consumer(shared: Shared, name: str, group: GroupInfo, info: ConsumerInfo) -> ConsumerRow:
    pending = []
    if info.pending:
        try:
            pending = await shared.broker.xpending_range(name, group.name, count=1, consumer=info.name)
        except MillstreamError:
            pending = []  # the stream or group was removed meanwhile
    oldest = pending[0] if pending else None
    return ConsumerRow(
        info.name, info.pending, info.idle_ms, oldest.id if oldest else None, oldest.idle_ms if oldest else None
    )


async def _search(shared: Shared, values: Values, start: str, root: str) -> None:
    slice = await search_slice(shared, values, start, root)
    total = max(values["facts"]["length"], slice["searched"])
    values |= {"entries": slice["entries"], "searched": slice["searched"], "search_total": total}
    values["search_share"] = min(1.0, slice["searched"] / total) if total else 1.0
    values["search_next"] = slice["next"]
    values["continue_url"] = slice["next"].replace("/stream/search?", "/stream?", 1) if slice["next"] else None


async def search_slice(shared: Shared, values: Values, start: str, root: str) -> Values:
    """Search one slice: the matching entries, the number of searched entries, and the URL of the next slice."""
    oldest_first = values["order"] == "oldest"
    result = await search(shared.broker, values["name"], values["query"], start, oldest_first=oldest_first)
    now_ms = await shared.broker.server_time_ms()
    params = [("name", values["encoded_name"]), ("q", values["query"]), ("order", values["order"])]
    next_url = None if result.next_id is None else root + address("/stream/search", [*params, ("from", result.next_id)])
    return {"entries": [view(entry, now_ms) for entry in result.entries], "searched": result.searched, "next": next_url}


async def continue_search(shared: Shared, query: Query, root: str) -> Values:
    """Search a later slice, for the script that continues a search."""
    values = _addresses(query.name("name"), query)
    return await search_slice(shared, values, parse_start(values["start"]) if values["start"] else "", root)


PAGES = (WebPage("/stream", "stream.html", "/", load),)
