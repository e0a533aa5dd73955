"""``millstream pending``: see what was handed out and not acknowledged; claim or acknowledge it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from millstream.cli import show
from millstream.cli.lookup import need_consumer, need_group, need_stream, no_entry, opened
from millstream.cli.show import DEFAULT_URL, MOST_SECONDS, Output, OutputKind, Url, Yes, ident, name, number, span, text
from millstream.observe import duration, entries, named, printable

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]
Ids = Annotated[list[str], typer.Argument(help="The ids of the entries.")]


@app.command("ls")
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


@app.command()
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


@app.command()
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
