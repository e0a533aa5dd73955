"""``millstream consumers``: look at consumers, and remove dead ones without losing their work."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.ages import duration
from millstream.cli.opened import opened
from millstream.cli.options import DEFAULT_URL, Output, OutputKind, Url, Yes

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]


@app.command("ls")
def list_consumers(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="One group; all of them by default.")] = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """The consumers of a stream's groups, with what they hold and how long they have been silent."""
    with opened(url) as broker:
        found = broker.group_info(stream)
    items = [
        {
            "group": one.name,
            "consumer": consumer.name,
            "pending": consumer.pending,
            "idle_ms": consumer.idle_ms,
            "silent_for": duration(consumer.idle_ms),
        }
        for one in found
        if group is None or one.name == group
        for consumer in one.consumers
    ]
    show.rows(output, ("group", "consumer", "pending", "silent_for"), items)


@app.command()
def reap(
    stream: Stream,
    group: Group,
    idle_s: Annotated[float, typer.Option("--idle", min=0, help="Dead after this many seconds of silence.")] = 600,
    to: Annotated[str | None, typer.Option("--to", help="Who gets what the dead ones hold.")] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Remove consumers that have been silent for long. Those that still hold entries need --to."""
    with opened(url) as broker:
        members = next((one.consumers for one in broker.group_info(stream) if one.name == group), [])
        dead = [one for one in members if one.idle_ms >= idle_s * 1000 and one.name != to]
        if not dead:
            typer.echo(f"no consumer has been silent for {duration(idle_s * 1000)}")
            return
        show.table(["consumer", "pending", "silent for"], [[x.name, x.pending, duration(x.idle_ms)] for x in dead])
        show.confirm(
            f"Remove these {len(dead)} consumers{f', handing their entries to {to!r}' if to else ''}?", yes=yes
        )
        for consumer in dead:
            moved = broker.delete_consumer(stream, group, consumer.name, to=to)
            typer.echo(f"removed {show.printable(consumer.name)}; {moved:,} entries handed over")
