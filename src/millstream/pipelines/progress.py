"""What people see while pipelines run: a live table on a terminal, a line for each batch elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.pipelines.query import Standing

Show = Callable[[list[Standing]], None]


@contextmanager
def display(*, quiet: bool = False) -> Iterator[Show | None]:
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield lambda standings: live.update(_table(standings))


def _table(standings: list[Standing]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("pipeline", "state", "batch", "rows", "rows/s", "batch ms", "sinks"):
        shown.add_column(column, justify="right" if column in ("batch", "rows", "rows/s", "batch ms") else "left")
    for one in standings:
        style = {"running": "green", "failed": "red", "paused": "yellow"}.get(one.state, "")
        progress = one.progress
        sinks = Text(", ").join(
            Text(f"{name} {state}", style="" if state == "ok" else "yellow") for name, state in one.sinks.items()
        )
        shown.add_row(
            Text(one.name),
            Text(one.state, style=style),
            _number(one.batch),
            _number(progress.get("rows")),
            _number(progress.get("processed_rows_per_second")),
            _number(progress.get("batch_ms")),
            sinks,
        )
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _lines() -> Show:
    """A line where something new is to be said."""
    said: dict[str, str] = {}

    def show(standings: list[Standing]) -> None:
        for one in standings:
            progress = one.progress
            sinks = ", ".join(f"{name} {state}" for name, state in one.sinks.items())
            line = (
                f"{one.name}: {one.state}, batch {_number(progress.get('batch'))}, {_number(progress.get('rows'))} rows"
            )
            line += f", {_number(progress.get('processed_rows_per_second'))} rows/s, sinks: {sinks}"
            if said.get(one.name) != line:
                said[one.name] = line
                sys.stderr.write(line + "\n")

    return show
