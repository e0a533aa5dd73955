"""What people see while pipelines run: a live table on a terminal, a line for each batch elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.pipelines.status import PipelineStatus

Show = Callable[[list[PipelineStatus]], None]
_COLUMNS = ("pipeline", "state", "batch", "rows", "rows/s", "lag", "batch ms", "sinks")
_WORDS = ("pipeline", "state", "sinks")
_STYLES = {"retrying": "yellow", "catching up": "yellow", "failing": "red", "failed": "red"}


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
        yield lambda statuses: live.update(_table(statuses))


def _table(statuses: list[PipelineStatus]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        shown.add_column(column, justify="left" if column in _WORDS else "right")
    for one in statuses:
        style = {"running": "green", "failed": "red", "paused": "yellow"}.get(one.state, "")
        progress = one.progress
        sinks = Text(", ").join(
            Text(f"{name} {state}", style=_STYLES.get(state, "")) for name, state in one.sinks.items()
        )
        shown.add_row(
            Text(one.name),
            Text(one.state, style=style),
            _number(one.batch),
            _number(progress.get("rows")),
            _number(progress.get("processed_rows_per_second")),
            _number(progress.get("lag")),
            _number(progress.get("batch_ms")),
            sinks,
        )
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _lines() -> Show:
    """A line where something new is to be said."""
    said: dict[str, str] = {}

    def show(statuses: list[PipelineStatus]) -> None:
        for one in statuses:
            line = _line(one)
            if said.get(one.name) != line:
                said[one.name] = line
                sys.stderr.write(line + "\n")

    return show


def _line(one: PipelineStatus) -> str:
    progress = one.progress
    parts = [
        f"batch {_number(progress.get('batch'))}",
        f"{_number(progress.get('rows'))} rows",
        f"{_number(progress.get('processed_rows_per_second'))} rows/s",
        f"lag {_number(progress.get('lag'))}",
        f"{_number(progress.get('batch_ms'))} ms",
        "sinks: " + ", ".join(f"{name} {state}" for name, state in one.sinks.items()),
    ]
    return f"{one.name}: {one.state}, " + ", ".join(parts)
