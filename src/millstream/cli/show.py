"""Output of all commands, as tables for people or JSON for programs, and the options that commands share.

A command builds items of plain values: numbers, ids, names, times. ``rows``, ``facts`` and ``outcome`` print them as
JSON (``docs/reference/json.md`` lists the keys) or as text that fits the terminal. Numbers and ids are never cut; names
are. Untrusted text is escaped.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import typer
from rich.cells import cell_len, chop_cells
from rich.console import Console

from millstream.cli.main import DECLINED
from millstream.model import EntryId
from millstream.observe.format import age, duration, printable, size


class OutputKind(StrEnum):
    table = "table"
    json = "json"


Url = Annotated[
    str,
    typer.Option("--url", envvar="MILLSTREAM_URL", show_default=True, help="URL of the broker."),
]
Output = Annotated[OutputKind, typer.Option("--output", "-o", help="A table for people, or JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; required without a terminal.")]

MAX_SECONDS = 1e9
"""Thirty years. Servers and clocks do not accept infinity."""
DEFAULT_URL = "redis://127.0.0.1:6379"


GAP = 2
MIN_NAME_WIDTH = 12
MIN_WIDTH = 4
MAX_PADDED_WIDTH = 120
"""Without a terminal names are not cut. A longer one does not widen its column: in each of 10,000 rows, that would cost
as many bytes as the name has."""

CutAt = Literal["not", "middle", "end"]
"""Where a value is cut: numbers and ids never, names in the middle, sentences at the end."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``spare``: dropped first, from the right, if the terminal is narrow; JSON always has it."""

    key: str
    title: str
    cut_at: CutAt = "middle"
    right: bool = False
    spare: bool = False
    render: Callable[[Any], str] = printable


def _count(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _yes_or_no(value: Any) -> str:
    return "yes" if value else "no"


def name(key: str, title: str = "", *, spare: bool = False) -> Column:
    return Column(key, title or _title(key), spare=spare)


def text(key: str, title: str = "", *, spare: bool = False, render: Callable[[Any], str] | None = None) -> Column:
    return Column(key, title or _title(key), "end", spare=spare, render=render or (lambda value: printable(str(value))))


def number(key: str, title: str = "", *, spare: bool = False) -> Column:
    return Column(key, title or _title(key), "not", True, spare, _count)


def ident(key: str, title: str = "", *, spare: bool = False) -> Column:
    """A column of ids or tokens, which are printed without thousands separators."""
    return Column(key, title or _title(key), "not", False, spare, lambda value: printable(str(value)))


def flag(key: str, title: str = "") -> Column:
    return Column(key, title or _title(key), "not", render=_yes_or_no)


def span(key: str, title: str = "", *, spare: bool = False) -> Column:
    """A column of milliseconds, formatted as durations."""
    return Column(key, title or _title(key), "not", True, spare, duration)


def memory(key: str, title: str = "memory") -> Column:
    return Column(key, title, "not", True, False, size)


def ago(key: str, now_ms: int, title: str = "", *, spare: bool = False) -> Column:
    """A column of times, formatted as ages by the server's clock."""

    def render(value: datetime) -> str:
        return age(now_ms, EntryId(round(value.timestamp() * 1000), 0))

    return Column(key, title or _title(key), "not", True, spare, render)


def _title(key: str) -> str:
    return key.replace("_", " ")


class Layout(NamedTuple):
    """A table that fits the terminal: its columns, widths and cells, and the columns that were dropped."""

    columns: Sequence[Column]
    widths: Sequence[int]
    cells: Sequence[Sequence[str]]
    left_out: Sequence[Column]

    def line(self, cells: Sequence[str]) -> str:
        return (" " * GAP).join(map(self.padded, range(len(cells)), cells)).rstrip()

    def padded(self, at: int, cell: str) -> str:
        space = " " * (self.widths[at] - cell_len(cell))  # a name without a limit may be wider than its column
        return space + cell if self.columns[at].right else cell + space

    def header(self) -> str:
        return self.line(
            [cut(column.title, width, "end") for column, width in zip(self.columns, self.widths, strict=True)]
        )

    def lines(self) -> list[str]:
        return [self.line(row) for row in self.cells]


def lay_out(columns: Sequence[Column], items: Sequence[Mapping[str, Any]], width: int | None) -> Layout:
    """Fit a table into ``width``; None: unlimited, for a pipe."""
    cells = {column.key: [_cell(column, item.get(column.key)) for item in items] for column in columns}
    natural = {column.key: max(map(cell_len, [column.title, *cells[column.key]])) for column in columns}
    visible, left_out = list(columns), []
    if width is not None:
        while len(visible) > 1 and _needed(visible, natural, MIN_NAME_WIDTH) > width:
            spare = next((column for column in reversed(visible) if column.spare), None)
            if spare is None:
                break
            visible.remove(spare)
            left_out.append(spare)
        while len(visible) > 1 and _needed(visible, natural, MIN_WIDTH) > width:
            left_out.append(visible.pop())
    if width is None:
        widths = [min(natural[column.key], MAX_PADDED_WIDTH) for column in visible]
        return Layout(visible, widths, [[cells[column.key][at] for column in visible] for at in range(len(items))], [])
    widths = _shrunk(visible, natural, width)
    rows = [
        [cut(cells[column.key][at], limit, column.cut_at) for column, limit in zip(visible, widths, strict=True)]
        for at in range(len(items))
    ]
    return Layout(visible, widths, rows, left_out)


def _cell(column: Column, value: Any) -> str:
    return "-" if value is None else column.render(value)


def _needed(columns: Sequence[Column], natural: Mapping[str, int], min_width: int) -> int:
    widths = [
        natural[column.key] if column.cut_at == "not" else min(natural[column.key], min_width) for column in columns
    ]
    return sum(widths) + GAP * (len(columns) - 1)


def _shrunk(columns: Sequence[Column], natural: Mapping[str, int], width: int) -> list[int]:
    # A name of a megabyte needs no million steps below.
    widths = [
        natural[column.key] if column.cut_at == "not" else min(natural[column.key], max(width, MIN_WIDTH))
        for column in columns
    ]
    can_be_cut = [at for at, column in enumerate(columns) if column.cut_at != "not"]
    over = sum(widths) + GAP * (len(widths) - 1) - width
    while over > 0 and can_be_cut:
        widest = max(can_be_cut, key=lambda at: widths[at])
        if widths[widest] <= MIN_WIDTH:
            break
        widths[widest] -= 1
        over -= 1
    if over > 0:  # a single column of numbers is wider than the screen
        widths[-1] = max(1, widths[-1] - over)
    return widths


def cut(text: str, width: int, cut_at: CutAt) -> str:
    """Cut a text to ``width`` cells: a name keeps its beginning and end, a sentence its beginning."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    if cut_at == "middle":
        tail = _fitting(text[::-1], (width - 1) // 2)[::-1]
        return _fitting(text, width - 1 - cell_len(tail)) + "…" + tail
    return _fitting(text, width - 1) + "…"


def _fitting(text: str, width: int) -> str:
    return chop_cells(text[: width + 1], width)[0] if width and text else ""


def screen_width(to: TextIO | None = None) -> int | None:
    """The width of the terminal; None without a terminal, where nothing is cut."""
    return shutil.get_terminal_size().columns if (to or sys.stdout).isatty() else None


def table(columns: Sequence[Column], items: Sequence[Mapping[str, Any]], *, title: str | None = None) -> None:
    """Print a table. Uses plain lines, because rich tables are slow with thousands of rows."""
    layout = lay_out(columns, items, screen_width())
    if title:
        typer.secho(printable(title), italic=True)
    typer.secho(layout.header(), bold=True)
    typer.echo("\n".join(layout.lines()))
    if layout.left_out:
        names = ", ".join(column.title for column in layout.left_out)
        typer.secho(f"(hidden columns: {names}; use a wider terminal or -o json)", dim=True, err=True)


def rows(
    output: OutputKind, columns: Sequence[Column], items: Sequence[Mapping[str, Any]], *, title: str | None = None
) -> None:
    """Print items as a table or as JSON."""
    if output is OutputKind.json:
        as_json(items)
    elif not items:
        typer.secho("nothing to show", dim=True, err=True)
    else:
        table(columns, items, title=title)


def facts(columns: Sequence[Column], item: Mapping[str, Any]) -> None:
    """Print one item, a line for each value; a long value continues with an indent."""
    widest = max(cell_len(column.title) for column in columns)
    for column in columns:
        value = item.get(column.key)
        line = "-" if value is None else column.render(value)
        label = column.title + " " * (widest - cell_len(column.title) + GAP)
        typer.echo("\n".join(hanging(label, line)))


def hanging(label: str, line: str) -> list[str]:
    """Wrap a line after its label at word boundaries; further lines are indented to the width of the label."""
    width, indent = screen_width(), cell_len(label)
    if width is None or indent + cell_len(line) <= width:
        return [(label + line).rstrip()]
    broken = textwrap.wrap(line, max(20, width - indent), break_on_hyphens=False) or [""]
    return [label + broken[0], *(" " * indent + part for part in broken[1:])]


def error(text: str) -> None:
    """Print an error to stderr in red. On a terminal, long lines are wrapped at word boundaries."""
    _print_wrapped(text, "red")


def warning(text: str) -> None:
    """Print a warning to stderr in yellow, wrapped like an error."""
    _print_wrapped(text, "yellow")


def _print_wrapped(text: str, color: str) -> None:
    width, lines = screen_width(sys.stderr), text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in _wrap(line, width)]
    typer.secho("\n".join(lines), fg=color, err=True)


def _wrap(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    # Words longer than the screen are not broken, so that they can be copied from the terminal.
    parts = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return parts or [""]


def outcome(output: OutputKind, message: str, **values: Any) -> None:
    """Print what a command did: a message for people, or its values as JSON."""
    if output is OutputKind.json:
        as_json(values)
    else:
        typer.echo("\n".join(hanging("", message)))


def as_json(value: Any) -> None:
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=True))


def json_line(value: Any) -> None:
    """Print one object per line, for continuous output."""
    typer.echo(json.dumps(plain(value), ensure_ascii=True))


def plain(value: Any) -> Any:
    """Convert a value for JSON: ids and names to text, times to ISO 8601 in UTC."""
    if isinstance(value, EntryId):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        return printable(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def console() -> Console:
    return Console(soft_wrap=False)


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation, and exit if the answer is no. Without a terminal, ``--yes`` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        warning(f"{question} Nothing was changed: pass --yes to do it.")
        raise typer.Exit(DECLINED)
    if not typer.confirm(question):
        warning("Nothing was changed.")
        raise typer.Exit(DECLINED)
