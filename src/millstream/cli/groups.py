"""``millstream groups``, ``consumers`` and ``pending``.

List, create, move and remove consumer groups; list consumers, and remove dead ones without losing their pending
entries; list, claim and acknowledge pending entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from millstream.broker import BlockingBroker
from millstream.broker.operations.info import read_stream_stats
from millstream.cli import show
from millstream.cli.lookup import need_consumer, need_group, need_stream, no_entry, opened, streams_found
from millstream.cli.show import (
    DEFAULT_URL,
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
from millstream.model import ConsumerInfo, EntryId, parse_duration_ms
from millstream.observe.format import count_of, duration, entries, made_at, named, printable

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
    """List groups with their lag and pending entries."""
    with opened(url) as broker:
        streams = broker.run(read_stream_stats, streams_found(broker, pattern), memory=False)
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
        for stream in streams
        for group in stream.groups
    ]
    columns = [name("stream"), name("group"), number("consumers"), number("lag"), number("pending")]
    columns += [ago("oldest_pending_at", now_ms, "oldest"), ident("last_delivered_id", spare=True)]
    show.rows(output, columns, items)


@app.command()
def describe(stream: Stream, group: Group, url: Url = DEFAULT_URL, output: Output = OutputKind.table) -> None:
    """Show one group with its position and its consumers."""
    with opened(url) as broker:
        info = need_group(broker, stream, group)
    facts = {
        "stream": stream,
        "group": info.name,
        "last_delivered_id": info.last_delivered,
        "entries_read": info.entries_read,
        "lag": info.lag,
        "pending": info.pending,
    }
    members = [_consumer_values(consumer) for consumer in info.consumers]
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
    start: Annotated[str, typer.Option("--start", help="0 for all entries, $ for new entries, or an id.")],
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Create a group, and the stream if it does not exist. --start is required."""
    with opened(url) as broker:
        created = broker.create_group(stream, group, start=start)
    message = "created" if created else "the group already exists; nothing was changed"
    show.outcome(output, message, stream=stream, group=group, created=created)


@app.command()
def rm(
    stream: Stream, group: Group, yes: Yes = False, url: Url = DEFAULT_URL, output: Output = OutputKind.table
) -> None:
    """Remove a group, its position and its pending list."""
    with opened(url) as broker:
        info = need_group(broker, stream, group)
        show.confirm(
            f"Remove group {named(group)} of {named(stream)}: "
            f"{count_of(len(info.consumers), 'consumer', 'consumers')}, "
            f"{count_of(info.pending, 'pending entry', 'pending entries')} that will not be delivered again?",
            yes=yes,
        )
        broker.delete_group(stream, group)
    show.outcome(output, "removed", stream=stream, group=group, removed=True)


@app.command()
def reset(
    stream: Stream,
    group: Group,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="Deliver everything again.")] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="Skip all entries that were not delivered yet.")
    ] = False,
    to_id: Annotated[str | None, typer.Option("--to-id", help="Continue after this id.")] = None,
    to_datetime: Annotated[
        datetime | None, typer.Option("--to-datetime", help="Deliver entries from this time on (UTC).")
    ] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Move a group's position. Pending entries stay pending."""
    options = [bool(to_earliest), bool(to_latest), to_id is not None, to_datetime is not None]
    if sum(options) != 1:
        raise InvalidArgument(
            "reset", f"{sum(options)} positions", "exactly one of --to-earliest, --to-latest, --to-id, --to-datetime"
        )
    with opened(url) as broker:
        current = need_group(broker, stream, group)
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
        redelivered, skipped = _count_between(broker, stream, current.last_delivered, position)
        show.confirm(
            f"Group {named(group)} is at {current.last_delivered}. Move it to {position}? "
            f"({redelivered} delivered again, {skipped} skipped; {current.pending:,} stay pending)",
            yes=yes,
        )
        read = 0 if to_earliest else info.entries_added if to_latest else None
        broker.set_group_position(stream, group, position, entries_read=read)
    show.outcome(output, f"moved to {position}", stream=stream, group=group, position_id=position)


def _count_between(
    broker: BlockingBroker, stream: str, old: EntryId, new: EntryId, limit: int = 10_000
) -> tuple[str, str]:
    """Count the entries that a move would deliver again and skip, up to ``limit``."""
    low, high = sorted((old, new))
    count = len(broker.xrange(stream, f"({low}", high, count=limit)) if low != high else 0
    text = f"{count:,} or more entries" if count == limit else entries(count)
    return (text, "none") if new < old else ("none", text)


consumers = typer.Typer()


def _consumer_values(info: ConsumerInfo) -> dict[str, Any]:
    return {"consumer": info.name, "pending": info.pending, "idle_ms": info.idle_ms}


_CONSUMER = (name("consumer"), number("pending"), span("idle_ms", "silent for"))


@consumers.command("ls")
def list_consumers(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="A group; by default all groups.")] = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """List the consumers of a stream's groups with their pending entries and idle time."""
    with opened(url) as broker:
        need_stream(broker, stream)
        groups = broker.group_info(stream) if group is None else [need_group(broker, stream, group)]
    items = [{"group": info.name, **_consumer_values(consumer)} for info in groups for consumer in info.consumers]
    show.rows(output, [name("group"), *_CONSUMER], items)


@consumers.command()
def reap(
    stream: Stream,
    group: Group,
    idle: Annotated[
        str, typer.Option("--idle", help="Remove consumers that were silent for this long, such as 30s.")
    ] = "600s",
    to: Annotated[str | None, typer.Option("--to", help="The consumer that receives their pending entries.")] = None,
    discard: Annotated[
        bool, typer.Option("--discard", help="Drop their pending entries, which are then never handled.")
    ] = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Remove consumers that have been silent for long. If they have pending entries, pass --to or --discard."""
    if discard and to is not None:
        raise InvalidArgument("--to, --discard", "both", "one of them at most")
    idle_ms = _idle_ms(idle)
    with opened(url) as broker:
        members = need_group(broker, stream, group).consumers
        dead = [info for info in members if info.idle_ms >= idle_ms and info.name != to]
        if dead:
            if output is OutputKind.table:
                show.table(
                    _CONSUMER,
                    [_consumer_values(info) for info in dead],
                )
            show.confirm(
                f"Remove {count_of(len(dead), 'consumer', 'consumers')}{_effect(to, members, dead, discard)}?", yes=yes
            )
        removed = []
        for consumer in dead:
            count = broker.delete_consumer(stream, group, consumer.name, to=to, discard=discard)
            moved, dropped = (0, count) if discard else (count, 0)
            removed.append({"consumer": consumer.name, "handed_over": moved, "discarded": dropped})
            if output is OutputKind.table:
                effect = "dropped" if discard else "moved"
                typer.echo(f"removed {printable(consumer.name)}; {entries(count)} {effect}")
    if output is OutputKind.json:
        show.as_json(removed)
    elif not dead:
        typer.echo(f"no consumer has been silent for {duration(idle_ms)}")


def _idle_ms(written: str) -> int:
    """A number without a unit is in seconds."""
    is_bare = written.replace(".", "", 1).isdecimal()
    return parse_duration_ms(f"{written}s" if is_bare else written, "--idle")


def _effect(to: str | None, members: Sequence[ConsumerInfo], dead: Sequence[ConsumerInfo], discard: bool) -> str:
    if discard:
        return f", and drop {entries(sum(info.pending for info in dead))} without handling them"
    if to is None:
        return ""
    is_known = any(info.name == to for info in members)
    return f", and move their entries to {named(to)}{'' if is_known else ', a new consumer'}"


@pending.command("ls")
def list_pending(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="A group; by default all groups.")] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only pending entries of this consumer.")] = None,
    idle: Annotated[str, typer.Option("--idle", help="Idle for at least this long, such as 30s.")] = "0s",
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Maximum number.")] = 100,
    with_entries: Annotated[bool, typer.Option("--entries", help="Show the entries' fields too.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """List pending entries, oldest first, with consumer, idle time and number of deliveries."""
    idle_ms = _idle_ms(idle)
    with opened(url) as broker:
        if group is None:
            need_stream(broker, stream)
            groups = [info.name for info in broker.group_info(stream)]
        elif consumer is None:
            groups = [need_group(broker, stream, group).name]
        else:
            need_consumer(broker, stream, group, consumer)
            groups = [group]
        pending_entries = [
            (member_of, entry)
            for member_of in groups
            for entry in broker.xpending_range(
                stream,
                member_of,
                count=count,
                consumer=consumer,
                min_idle_ms=idle_ms or None,
                with_entries=with_entries,
            )
        ]
    items: list[dict[str, Any]] = [
        {
            "group": in_group,
            "id": entry.id,
            "consumer": entry.consumer,
            "idle_ms": entry.idle_ms,
            "deliveries": entry.times_delivered,
            **({"fields": entry.fields} if with_entries else {}),
        }
        for in_group, entry in sorted(pending_entries, key=lambda pair: pair[1].id)[:count]
    ]
    columns = [ident("id"), name("consumer"), span("idle_ms", "idle for"), number("deliveries")]
    if group is None:
        columns.insert(0, name("group"))
    if with_entries:
        columns.append(text("fields"))
        if output is OutputKind.table:
            items = [{**item, "fields": _format_fields(item["fields"])} for item in items]
    show.rows(output, columns, items)


def _format_fields(fields: Mapping[bytes, bytes] | None) -> str:
    """Format fields as one line. An entry that was deleted while pending has none."""
    if fields is None:
        return "(deleted)"
    return "  ".join(f"{printable(field)}={printable(value)}" for field, value in fields.items())


@pending.command()
def claim(
    stream: Stream,
    group: Group,
    consumer: Annotated[str, typer.Argument(help="The consumer that receives them.")],
    ids: Ids,
    idle: Annotated[
        str, typer.Option("--idle", help="Only entries that were idle for at least this long, such as 1h.")
    ] = "60s",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Claim pending entries for another consumer."""
    idle_ms = _idle_ms(idle)
    with opened(url) as broker:
        need_group(broker, stream, group)
        moved = broker.xclaim_ids(stream, group, consumer, ids, min_idle_ms=idle_ms)
    if not moved:
        where = f" that is pending in group {named(group)} and was idle for {duration(idle_ms)}"
        raise no_entry(stream, ids, where)
    show.rows(output, [ident("id")], [{"id": id} for id in moved])


@pending.command()
def ack(
    stream: Stream,
    group: Group,
    ids: Ids,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Acknowledge pending entries without handling them: they are not delivered again."""
    with opened(url) as broker:
        need_group(broker, stream, group)
        show.confirm(f"Acknowledge {entries(len(ids))} without handling them?", yes=yes)
        done = broker.xack(stream, group, ids)
    if not done:
        raise no_entry(stream, ids, f" that is pending in group {named(group)}")
    show.outcome(output, f"acknowledged {done:,}", stream=stream, group=group, acknowledged=done)
