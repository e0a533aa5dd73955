"""``millstream consumers``: look at consumers, and remove dead ones without losing their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.columns import name, number, span
from millstream.cli.lookup import need_group, need_stream, opened
from millstream.cli.options import DEFAULT_URL, MOST_SECONDS, Output, OutputKind, Url, Yes
from millstream.errors import InvalidArgument
from millstream.model import ConsumerInfo
from millstream.observe import count_of, duration, entries, named, printable

app = typer.Typer()

Stream = Annotated[str, typer.Argument(help="The stream's name.")]
Group = Annotated[str, typer.Argument(help="The group's name.")]
_CONSUMER = (name("consumer"), number("pending"), span("idle_ms", "silent for"))


@app.command("ls")
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


@app.command()
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
