"""How results look: tables for people, JSON for programs, and foreign text that cannot touch the terminal.

A command makes items of plain values once: numbers, ids, names, times. ``rows``, ``facts`` and ``outcome`` print them
as JSON (``docs/reference/json.md`` lists the keys) or as people read them, never wider than their terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console

from millstream.cli.columns import GAP, ShownColumn, lay_out
from millstream.cli.exit_codes import DECLINED
from millstream.cli.options import OutputKind
from millstream.model import EntryId
from millstream.observe import printable


def screen_width() -> int | None:
    """The terminal's columns; None where no terminal reads, and nothing may be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
        typer.secho(f"{question} Nothing was changed: pass --yes to do it.", fg="yellow", err=True)
        raise typer.Exit(DECLINED)
    if not typer.confirm(question):
        typer.secho("Nothing was changed.", fg="yellow", err=True)
        raise typer.Exit(DECLINED)
