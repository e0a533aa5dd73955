"""What people see while pipelines run: a live table on a terminal, a line for each batch elsewhere; and what all of it
came to, at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


class Tally:
    """An observer that counts what went in and what each sink took; facts may come from several threads."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._rows_in: Counter[str] = Counter()
        self._rows_out: dict[str, Counter[str]] = {}
        self._dead: Counter[str] = Counter()

    def begin(self) -> None:
        """The clock of the rate starts here: Spark's own start is not the pipeline's."""
        self._began = time.monotonic()

    def __call__(self, name: str, /, **facts: Any) -> None:
        with self._lock:
            if name == "pipeline.batch":
                self._rows_in[facts["pipeline"]] += facts["events"]
            elif name == "pipeline.sink":
                self._rows_out.setdefault(facts["pipeline"], Counter())[facts["sink"]] += facts["rows"] or 0
            elif name == "pipeline.dead_letters":
                self._dead[facts["pipeline"]] += facts["events"]

    def lines(self, pipeline: str, sinks: list[str]) -> list[str]:
        seconds = max(time.monotonic() - self._began, 0.001)
        with self._lock:
            rows, taken, dead = self._rows_in[pipeline], self._rows_out.get(pipeline, Counter()), self._dead[pipeline]
        lines = [f"{_rows(rows)} in, {seconds:.1f} s, {rows / seconds:,.0f} rows/s"]
        lines += [f"sink {name}: {_rows(taken[name])} out" for name in sinks]
        if dead:
            lines.append(f"dead letters: {dead:,}; see why: millstream dlq ls {pipeline}")
        return lines


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
