"""``millstream pending``: see what was handed out and not acknowledged; claim or acknowledge it."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.lookup import need_consumer, need_group, no_entry, opened
from millstream.cli.options import DEFAULT_URL, MOST_SECONDS, Output, OutputKind, Url, Yes
from millstream.observe import duration, entries, named, printable

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]
Ids = Annotated[list[str], typer.Argument(help="The ids of the entries.")]


@app.command("ls")
def list_pending(
    stream: Stream,
    group: Group,
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
        if consumer is None:
            need_group(broker, stream, group)
        else:
            need_consumer(broker, stream, group, consumer)
        found = broker.xpending_range(
            stream,
            group,
            count=count,
            consumer=consumer,
            min_idle_ms=int(idle_s * 1000) or None,
            with_entries=with_entries,
        )
    items = [
        {
            "id": str(one.id),
            "consumer": one.consumer,
            "idle_ms": one.idle_ms,
            "idle": duration(one.idle_ms),
            "deliveries": one.times_delivered,
            **({"fields": _fields(one.fields, output)} if with_entries else {}),
        }
        for one in found
    ]
    columns = ("id", "consumer", "idle", "deliveries")
    show.rows(output, (*columns, "fields") if with_entries else columns, items)


def _fields(fields: dict[bytes, bytes] | None, output: OutputKind) -> dict[str, str] | str | None:
    """None, or a word for people, where the entry was deleted while it was pending."""
    if fields is None:
        return None if output is OutputKind.json else "(deleted)"
    shown = {printable(name): printable(value) for name, value in fields.items()}
    return shown if output is OutputKind.json else "  ".join(f"{name}={value}" for name, value in shown.items())


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
    show.rows(output, ("id",), [{"id": str(one)} for one in moved])


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
