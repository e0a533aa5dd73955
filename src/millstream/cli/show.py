"""How results look: tables for people, JSON for programs, and foreign text that cannot touch the terminal; and the
options that every command shares.

A command makes items of plain values once: numbers, ids, names, times. ``rows``, ``facts`` and ``outcome`` print them
as JSON (``docs/reference/json.md`` lists the keys) or as people read them, never wider than their terminal: numbers
and ids stay whole, names give way. A column names the key of its value in an item.
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
from millstream.observe import age, duration, printable, size


class OutputKind(StrEnum):
    table = "table"
    json = "json"


Url = Annotated[
    str,
    typer.Option("--url", envvar="MILLSTREAM_URL", show_default=True, help="Where the streams live."),
]
Output = Annotated[OutputKind, typer.Option("--output", "-o", help="A table for people, or JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where nobody can answer.")]

MOST_SECONDS = 1e9
"""Thirty years: infinity is no number of seconds that a server or a clock could take."""
DEFAULT_URL = "redis://127.0.0.1:6379"


GAP = 2
ROOM_FOR_A_NAME = 12
LEAST = 4

CutAt = Literal["not", "middle", "end"]
"""How a value makes room: a number or an id not at all, a name in its middle, a sentence at its end."""


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """``spare``: left out first where there is no room, the last one first; the JSON has it still."""

    key: str
    title: str
    cut_at: CutAt = "middle"
    right: bool = False
    spare: bool = False
    shown: Callable[[Any], str] = printable


def _count(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _yes_or_no(value: Any) -> str:
    return "yes" if value else "no"


def name(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    return ShownColumn(key, title or _title(key), spare=spare)


def text(key: str, title: str = "", *, spare: bool = False, shown: Callable[[Any], str] | None = None) -> ShownColumn:
    return ShownColumn(
        key, title or _title(key), "end", spare=spare, shown=shown or (lambda value: printable(str(value)))
    )


def number(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    return ShownColumn(key, title or _title(key), "not", True, spare, _count)


def ident(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    """An id or a token: a number that nobody adds up, so it has no thousands."""
    return ShownColumn(key, title or _title(key), "not", False, spare, lambda value: printable(str(value)))


def flag(key: str, title: str = "") -> ShownColumn:
    return ShownColumn(key, title or _title(key), "not", shown=_yes_or_no)


def span(key: str, title: str = "", *, spare: bool = False) -> ShownColumn:
    """Milliseconds, as people say them."""
    return ShownColumn(key, title or _title(key), "not", True, spare, duration)


def memory(key: str, title: str = "memory") -> ShownColumn:
    return ShownColumn(key, title, "not", True, False, size)


def ago(key: str, now_ms: int, title: str = "", *, spare: bool = False) -> ShownColumn:
    """A time, as how long ago it was by the server's clock."""

    def shown(value: datetime) -> str:
        return age(now_ms, EntryId(round(value.timestamp() * 1000), 0))

    return ShownColumn(key, title or _title(key), "not", True, spare, shown)


def _title(key: str) -> str:
    return key.replace("_", " ")


class Layout(NamedTuple):
    """What fits: the columns that are shown, their widths, their cells, and those that there was no room for."""

    columns: Sequence[ShownColumn]
    widths: Sequence[int]
    cells: Sequence[Sequence[str]]
    left_out: Sequence[ShownColumn]

    def line(self, cells: Sequence[str]) -> str:
        return (" " * GAP).join(map(self.padded, range(len(cells)), cells)).rstrip()

    def padded(self, at: int, cell: str) -> str:
        space = " " * (self.widths[at] - cell_len(cell))
        return space + cell if self.columns[at].right else cell + space

    def header(self) -> str:
        return self.line([cut(one.title, width, "end") for one, width in zip(self.columns, self.widths, strict=True)])

    def lines(self) -> list[str]:
        return [self.line(row) for row in self.cells]


def lay_out(columns: Sequence[ShownColumn], items: Sequence[Mapping[str, Any]], width: int | None) -> Layout:
    """``width`` None: as wide as it likes to be, for a pipe."""
    cells = {one.key: [_cell(one, item.get(one.key)) for item in items] for one in columns}
    natural = {one.key: max(map(cell_len, [one.title, *cells[one.key]])) for one in columns}
    chosen, left_out = list(columns), []
    if width is not None:
        while len(chosen) > 1 and _needed(chosen, natural, ROOM_FOR_A_NAME) > width:
            spare = next((one for one in reversed(chosen) if one.spare), None)
            if spare is None:
                break
            chosen.remove(spare)
            left_out.append(spare)
        while len(chosen) > 1 and _needed(chosen, natural, LEAST) > width:
            left_out.append(chosen.pop())
    widths = _shrunk(chosen, natural, width)
    shown = [
        [cut(cells[one.key][at], room, one.cut_at) for one, room in zip(chosen, widths, strict=True)]
        for at in range(len(items))
    ]
    return Layout(chosen, widths, shown, left_out)


def _cell(column: ShownColumn, value: Any) -> str:
    return "-" if value is None else column.shown(value)


def _needed(columns: Sequence[ShownColumn], natural: Mapping[str, int], room: int) -> int:
    least = [natural[one.key] if one.cut_at == "not" else min(natural[one.key], room) for one in columns]
    return sum(least) + GAP * (len(columns) - 1)


def _shrunk(columns: Sequence[ShownColumn], natural: Mapping[str, int], width: int | None) -> list[int]:
    widths = [natural[one.key] for one in columns]
    if width is None:
        return widths
    may_be_cut = [at for at, one in enumerate(columns) if one.cut_at != "not"]
    over = sum(widths) + GAP * (len(widths) - 1) - width
    while over > 0 and may_be_cut:
        widest = max(may_be_cut, key=lambda at: widths[at])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
        over -= 1
    if over > 0:  # one column of numbers that is wider than the screen
        widths[-1] = max(1, widths[-1] - over)
    return widths


def cut(text: str, width: int, cut_at: CutAt) -> str:
    """The text in at most ``width`` cells: a name keeps its beginning and its end, a sentence its beginning."""
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
    """The terminal's columns; None where no terminal reads, and nothing may be cut."""
    return shutil.get_terminal_size().columns if (to or sys.stdout).isatty() else None


def table(columns: Sequence[ShownColumn], items: Sequence[Mapping[str, Any]], *, title: str | None = None) -> None:
    """Plain lines: a thousand of them must not be felt."""
    laid = lay_out(columns, items, screen_width())
    if title:
        typer.secho(printable(title), italic=True)
    typer.secho(laid.header(), bold=True)
    typer.echo("\n".join(laid.lines()))
    if laid.left_out:
        names = ", ".join(column.title for column in laid.left_out)
        typer.secho(f"(no room for: {names}; a wider terminal or -o json has them)", dim=True, err=True)


def rows(
    output: OutputKind, columns: Sequence[ShownColumn], items: Sequence[Mapping[str, Any]], *, title: str | None = None
) -> None:
    """The same items as a table or as JSON."""
    if output is OutputKind.json:
        as_json(items)
    elif not items:
        typer.secho("nothing to show", dim=True, err=True)
    else:
        table(columns, items, title=title)


def facts(columns: Sequence[ShownColumn], item: Mapping[str, Any]) -> None:
    """One thing, a line for each of its facts; a long one goes on under itself."""
    widest = max(cell_len(column.title) for column in columns)
    for column in columns:
        value = item.get(column.key)
        line = "-" if value is None else column.shown(value)
        label = column.title + " " * (widest - cell_len(column.title) + GAP)
        typer.echo("\n".join(hanging(label, line)))


def hanging(label: str, line: str) -> list[str]:
    """The line behind its label, broken between words where the screen ends, each further one under the first."""
    width, indent = screen_width(), cell_len(label)
    if width is None or indent + cell_len(line) <= width:
        return [(label + line).rstrip()]
    broken = textwrap.wrap(line, max(20, width - indent), break_on_hyphens=False) or [""]
    return [label + broken[0], *(" " * indent + more for more in broken[1:])]


def error(text: str) -> None:
    """What went wrong, in red. On a terminal its lines are broken between words, and what goes on is indented."""
    _tell(text, "red")


def warning(text: str) -> None:
    """What is worth knowing, in yellow, broken as an error is."""
    _tell(text, "yellow")


def _tell(text: str, color: str) -> None:
    width, lines = screen_width(sys.stderr), text.split("\n")
    if width is not None:
        lines = [part for line in lines for part in _broken(line, width)]
    typer.secho("\n".join(lines), fg=color, err=True)


def _broken(line: str, width: int) -> list[str]:
    under = " " * (len(line) - len(line.lstrip(" ")) + 2)
    # A word that is longer than the screen is left to the terminal, from which it can be copied whole.
    parts = textwrap.wrap(line, width, subsequent_indent=under, break_on_hyphens=False, break_long_words=False)
    return parts or [""]


def outcome(output: OutputKind, sentence: str, **known: Any) -> None:
    """What a command did: a sentence for people, the facts in it for programs."""
    if output is OutputKind.json:
        as_json(known)
    else:
        typer.echo("\n".join(hanging("", sentence)))


def as_json(value: Any) -> None:
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=True))


def json_line(value: Any) -> None:
    """One object a line, for output that goes on."""
    typer.echo(json.dumps(plain(value), ensure_ascii=True))


def plain(value: Any) -> Any:
    """What JSON has: ids and names as texts, times as ISO 8601 in UTC, numbers as they are."""
    if isinstance(value, EntryId):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        return printable(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def console() -> Console:
    return Console(soft_wrap=False)


def confirm(question: str, *, yes: bool) -> None:
    """Goes on after a yes. Without a terminal to ask on, ``--yes`` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        warning(f"{question} Nothing was changed: pass --yes to do it.")
        raise typer.Exit(DECLINED)
    if not typer.confirm(question):
        warning("Nothing was changed.")
        raise typer.Exit(DECLINED)
