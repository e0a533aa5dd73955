"""``millstream groups``, ``consumers`` and ``pending``: look at consumer groups, make, move and remove them; look at
their consumers, and remove dead ones without losing their work; see what was handed out and not acknowledged, and claim
or acknowledge it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from millstream.broker import BlockingBroker, survey
from millstream.cli import show
from millstream.cli.lookup import need_consumer, need_group, need_stream, no_entry, opened, streams_found
from millstream.cli.show import (
    DEFAULT_URL,
    MOST_SECONDS,
    Output,
    OutputKind,
    Url,
    Yes,
    ago,
    ident,
    name,
    number,
    span,
    text,
)
from millstream.errors import InvalidArgument
from millstream.model import ConsumerInfo, EntryId
from millstream.observe import count_of, duration, entries, made_at, named, printable

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]
pending = typer.Typer()

Ids = Annotated[list[str], typer.Argument(help="The ids of the entries.")]


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


consumers = typer.Typer()

_CONSUMER = (name("consumer"), number("pending"), span("idle_ms", "silent for"))


@consumers.command("ls")
def list_consumers(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="One group; all of them by default.")] = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """The consumers of a stream's groups, with what they hold and how long they have been silent."""
    with opened(url) as broker:
        need_stream(broker, stream)
        found = broker.group_info(stream) if group is None else [need_group(broker, stream, group)]
    items = [
        {
            "group": one.name,
            "consumer": consumer.name,
            "pending": consumer.pending,
            "idle_ms": consumer.idle_ms,
        }
        for one in found
        for consumer in one.consumers
    ]
    show.rows(output, [name("group"), *_CONSUMER], items)


@consumers.command()
def reap(
    stream: Stream,
    group: Group,
    idle_s: Annotated[
        float, typer.Option("--idle", min=0, max=MOST_SECONDS, help="Dead after this many seconds of silence.")
    ] = 600,
    to: Annotated[str | None, typer.Option("--to", help="Who gets what the dead ones hold.")] = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Throw away what the dead ones hold: nobody will handle it.")
    ] = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Remove consumers that have been silent for long. Those that still hold entries need --to, or --discard."""
    if discard and to is not None:
        raise InvalidArgument("--to, --discard", "both", "one of them at most")
    with opened(url) as broker:
        members = need_group(broker, stream, group).consumers
        dead = [one for one in members if one.idle_ms >= idle_s * 1000 and one.name != to]
        if dead:
            if output is OutputKind.table:
                show.table(
                    _CONSUMER,
                    [{"consumer": one.name, "pending": one.pending, "idle_ms": one.idle_ms} for one in dead],
                )
            show.confirm(
                f"Remove {count_of(len(dead), 'consumer', 'consumers')}{_heir(to, members, dead, discard)}?", yes=yes
            )
        removed = []
        for consumer in dead:
            held = broker.delete_consumer(stream, group, consumer.name, to=to, discard=discard)
            handed, thrown = (0, held) if discard else (held, 0)
            removed.append({"consumer": consumer.name, "handed_over": handed, "discarded": thrown})
            if output is OutputKind.table:
                became = "thrown away" if discard else "handed over"
                typer.echo(f"removed {printable(consumer.name)}; {entries(held)} {became}")
    if output is OutputKind.json:
        show.as_json(removed)
    elif not dead:
        typer.echo(f"no consumer has been silent for {duration(idle_s * 1000)}")


def _heir(to: str | None, members: Sequence[ConsumerInfo], dead: Sequence[ConsumerInfo], discard: bool) -> str:
    if discard:
        return f", and throw away {entries(sum(one.pending for one in dead))} that nobody will handle"
    if to is None:
        return ""
    known = any(one.name == to for one in members)
    return f", handing their entries to {named(to)}{'' if known else ', whom the group does not know yet'}"


@pending.command("ls")
def list_pending(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="One group; all of them by default.")] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only this consumer's.")] = None,
    idle_s: Annotated[
        float, typer.Option("--idle", min=0, max=MOST_SECONDS, help="Idle for at least this many seconds.")
    ] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="At most this many.")] = 100,
    with_entries: Annotated[bool, typer.Option("--entries", help="Show the entries' fields too.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Pending entries, oldest first: who holds them, for how long, delivered how often."""
    with opened(url) as broker:
        if group is None:
            need_stream(broker, stream)
            groups = [one.name for one in broker.group_info(stream)]
        elif consumer is None:
            groups = [need_group(broker, stream, group).name]
        else:
            need_consumer(broker, stream, group, consumer)
            groups = [group]
        found = [
            (one, entry)
            for one in groups
            for entry in broker.xpending_range(
                stream,
                one,
                count=count,
                consumer=consumer,
                min_idle_ms=int(idle_s * 1000) or None,
                with_entries=with_entries,
            )
        ]
    items: list[dict[str, Any]] = [
        {
            "group": in_group,
            "id": one.id,
            "consumer": one.consumer,
            "idle_ms": one.idle_ms,
            "deliveries": one.times_delivered,
            **({"fields": one.fields} if with_entries else {}),
        }
        for in_group, one in sorted(found, key=lambda each: each[1].id)[:count]
    ]
    columns = [ident("id"), name("consumer"), span("idle_ms", "idle for"), number("deliveries")]
    if group is None:
        columns.insert(0, name("group"))
    if with_entries:
        columns.append(text("fields"))
        if output is OutputKind.table:
            items = [{**item, "fields": _told(item["fields"])} for item in items]
    show.rows(output, columns, items)


def _told(fields: Mapping[bytes, bytes] | None) -> str:
    """For people; an entry may have been deleted while it was pending."""
    if fields is None:
        return "(deleted)"
    return "  ".join(f"{printable(field)}={printable(value)}" for field, value in fields.items())


@pending.command()
def claim(
    stream: Stream,
    group: Group,
    consumer: Annotated[str, typer.Argument(help="Who gets them.")],
    ids: Ids,
    idle_s: Annotated[
        float, typer.Option("--idle", min=0, max=MOST_SECONDS, help="Only what was idle for so many seconds.")
    ] = 60,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Hand pending entries to another consumer."""
    with opened(url) as broker:
        need_group(broker, stream, group)
        moved = broker.xclaim_ids(stream, group, consumer, ids, min_idle_ms=int(idle_s * 1000))
    if not moved:
        why = f" in what group {named(group)} was handed out and has left alone for {duration(idle_s * 1000)}"
        raise no_entry(stream, ids, why)
    show.rows(output, [ident("id")], [{"id": one} for one in moved])


@pending.command()
def ack(
    stream: Stream,
    group: Group,
    ids: Ids,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Acknowledge entries by hand: they will not be delivered again."""
    with opened(url) as broker:
        need_group(broker, stream, group)
        show.confirm(f"Acknowledge {entries(len(ids))} that no handler has finished?", yes=yes)
        done = broker.xack(stream, group, ids)
    if not done:
        raise no_entry(stream, ids, f" in what group {named(group)} was handed out and has not acknowledged")
    show.outcome(output, f"acknowledged {done:,}", stream=stream, group=group, acknowledged=done)
