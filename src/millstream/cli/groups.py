"""``millstream groups``: look at consumer groups, make, move and remove them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from millstream.broker import BlockingBroker, survey
from millstream.cli import show
from millstream.cli.columns import ago, ident, name, number, span
from millstream.cli.lookup import need_group, opened, streams_found
from millstream.cli.options import DEFAULT_URL, Output, OutputKind, Url, Yes
from millstream.errors import InvalidArgument
from millstream.model import EntryId
from millstream.observe import count_of, entries, made_at, named

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]


@app.command("ls")
def list_groups(
    pattern: Annotated[str, typer.Argument(help="A glob for the streams.")] = "*",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """All groups with their lag and what is pending."""
    with opened(url) as broker:
        found = broker.run(survey, streams_found(broker, pattern), memory=False)
        now_ms = broker.server_time_ms()
    items = [
        {
            "stream": stream.name,
            "group": group.name,
            "consumers": group.consumers,
            "lag": group.lag,
            "pending": group.pending,
            "oldest_pending_id": group.oldest_pending,
            "oldest_pending_at": made_at(group.oldest_pending),
            "last_delivered_id": group.last_delivered,
        }
        for stream in found
        for group in stream.groups
    ]
    columns = [name("stream"), name("group"), number("consumers"), number("lag"), number("pending")]
    columns += [ago("oldest_pending_at", now_ms, "oldest"), ident("last_delivered_id", spare=True)]
    show.rows(output, columns, items)


@app.command()
def describe(stream: Stream, group: Group, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """One group: its position, and each consumer."""
    with opened(url) as broker:
        found = need_group(broker, stream, group)
    facts = {
        "stream": stream,
        "group": found.name,
        "last_delivered_id": found.last_delivered,
        "entries_read": found.entries_read,
        "lag": found.lag,
        "pending": found.pending,
    }
    members = [{"consumer": one.name, "pending": one.pending, "idle_ms": one.idle_ms} for one in found.consumers]
    if output is OutputKind.json:
        show.as_json({**facts, "consumers": members})
        return
    columns = [name("stream"), name("group"), ident("last_delivered_id"), number("entries_read")]
    show.facts([*columns, number("lag"), number("pending")], facts)
    typer.echo()
    show.rows(output, [name("consumer"), number("pending"), span("idle_ms", "silent for")], members)


@app.command()
def create(
    stream: Stream,
    group: Group,
    start: Annotated[str, typer.Option("--start", help="0 for everything, $ for what is new, or an id.")],
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Make a group, and the stream where it is absent. Where it starts must be said."""
    with opened(url) as broker:
        made = broker.create_group(stream, group, start=start)
    sentence = "created" if made else "it was there already; nothing was changed"
    show.outcome(output, sentence, stream=stream, group=group, created=made)


@app.command()
def rm(
    stream: Stream, group: Group, yes: Yes = False, url: Url = DEFAULT_URL, output: Output = OutputKind.table
) -> None:
    """Remove a group, its position and its pending list."""
    with opened(url) as broker:
        found = need_group(broker, stream, group)
        show.confirm(
            f"Remove group {named(group)} of {named(stream)}: "
            f"{count_of(len(found.consumers), 'consumer', 'consumers')}, "
            f"{count_of(found.pending, 'pending entry', 'pending entries')} that will not be delivered again?",
            yes=yes,
        )
        broker.delete_group(stream, group)
    show.outcome(output, "removed", stream=stream, group=group, removed=True)


@app.command()
def reset(
    stream: Stream,
    group: Group,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="Deliver everything again.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="Skip what has not been delivered.")] = False,
    to_id: Annotated[str | None, typer.Option("--to-id", help="Go on after this id.")] = None,
    to_datetime: Annotated[
        datetime | None, typer.Option("--to-datetime", help="Deliver what came at this time or later (UTC).")
    ] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Move a group's position. What is pending stays pending."""
    chosen = [bool(to_earliest), bool(to_latest), to_id is not None, to_datetime is not None]
    if sum(chosen) != 1:
        raise InvalidArgument(
            "reset", f"{sum(chosen)} positions", "exactly one of --to-earliest, --to-latest, --to-id, --to-datetime"
        )
    with opened(url) as broker:
        found = need_group(broker, stream, group)
        info = broker.stream_info(stream)
        if to_earliest:
            position = EntryId(0, 0)
        elif to_latest:
            position = info.last_generated
        elif to_id is not None:
            position = EntryId.parse(to_id, argument="--to-id")
        else:
            assert to_datetime is not None
            at = to_datetime if to_datetime.tzinfo else to_datetime.replace(tzinfo=UTC)
            position = EntryId(max(0, int(at.timestamp() * 1000)), 0)
            position = position.previous() if position.ms else position
        again, skipped = _moved(broker, stream, found.last_delivered, position)
        show.confirm(
            f"Group {named(group)} is at {found.last_delivered}. Move it to {position}? "
            f"({again} delivered again, {skipped} skipped; {found.pending:,} pending stay as they are)",
            yes=yes,
        )
        read = 0 if to_earliest else info.entries_added if to_latest else None
        broker.set_group_position(stream, group, position, entries_read=read)
    show.outcome(output, f"moved to {position}", stream=stream, group=group, position_id=position)


def _moved(broker: BlockingBroker, stream: str, old: EntryId, new: EntryId, most: int = 10_000) -> tuple[str, str]:
    """How many entries lie between the two positions, counted up to a bound."""
    low, high = sorted((old, new))
    count = len(broker.xrange(stream, f"({low}", high, count=most)) if low != high else 0
    text = f"{count:,} or more entries" if count == most else entries(count)
    return (text, "none") if new < old else ("none", text)
