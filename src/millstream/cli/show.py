"""How results look: tables for people, JSON for programs, and foreign text that cannot touch the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console

from millstream.cli.exit_codes import DECLINED
from millstream.cli.options import OutputKind
from millstream.observe import printable


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Numbers to the right, everything else to the left. Plain lines: a thousand of them must not be felt."""
    rows = [list(row) for row in rows]
    texts = [[_cell(value) for value in row] for row in rows]
    numeric = [all(isinstance(row[n], (int, float, type(None))) for row in rows) for n in range(len(columns))]
    widths = [max(cell_len(text) for text in column) for column in zip(columns, *texts, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for text, width, right in zip(cells, widths, numeric, strict=True):
            space = " " * (width - cell_len(text))
            padded.append(space + text if right else text + space)
        return "  ".join(padded).rstrip()

    if title:
        typer.secho(title, italic=True)
    if any(columns):
        typer.secho(line(columns), bold=True)
    typer.echo("\n".join(map(line, texts)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return printable(value) if isinstance(value, (str, bytes)) else printable(str(value))


def as_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=_jsonable, ensure_ascii=True))


def json_line(value: Any) -> None:
    """One object a line, for output that goes on."""
    typer.echo(json.dumps(value, default=_jsonable, ensure_ascii=True))


def _jsonable(value: Any) -> Any:
    return printable(value) if isinstance(value, bytes) else str(value)


def rows(
    output: OutputKind, columns: Sequence[str], items: Sequence[Mapping[str, Any]], *, title: str | None = None
) -> None:
    """The same rows as a table or as JSON; ``columns`` are the keys to show, in order."""
    if output is OutputKind.json:
        as_json([dict(item) for item in items])
    elif not items:
        typer.secho("nothing to show", dim=True, err=True)
    else:
        table(
            [column.replace("_", " ") for column in columns],
            [[item.get(c) for c in columns] for item in items],
            title=title,
        )


def outcome(output: OutputKind, sentence: str, **facts: Any) -> None:
    """What a command did: a sentence for people, the facts in it for programs."""
    if output is OutputKind.json:
        as_json(facts)
    else:
        typer.echo(sentence)


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
