"""``millstream bench``: run the suites, show a table or one JSON object."""

from __future__ import annotations

import importlib
import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from millstream.cli.exit_codes import FAILED
from millstream.cli.show import console


class Suite(StrEnum):
    broker = "broker"
    messaging = "messaging"
    assignment = "assignment"
    spark = "spark"
    pipeline = "pipeline"
    cdc = "cdc"


def command(
    suites: Annotated[list[Suite] | None, typer.Argument(help="Which suites; all of them by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of ours and the peer in turn; the median counts.")] = 3,
) -> None:
    from rich.table import Table

    from millstream.bench.result import Result, machine

    results: list[Result] = []
    for suite in suites or list(Suite):
        typer.secho(f"{suite}:", bold=True, err=True)
        try:
            module = importlib.import_module(f"millstream.bench.{suite}")
        except ModuleNotFoundError as error:
            typer.secho(f"  {error.name} is not installed. Run: pip install --group bench", fg="red", err=True)
            raise typer.Exit(FAILED) from None
        results += module.run(rounds, lambda text: typer.secho(f"  {text}", dim=True, err=True))
    if as_json:
        json.dump({"machine": machine(), "results": [result.as_json() for result in results]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "value", "unit", "peer", "peer's", "ratio", "goal", "reached"):
        table.add_column(column, justify="right" if column in ("value", "peer's", "ratio") else "left")
    for one in results:
        reached = {None: "-", True: "[green]yes[/]", False: "[red]no[/]"}[one.reached]
        numbers = [
            f"{x:,.2f}" if x is not None and x < 1000 else "-" if x is None else f"{x:,.0f}"
            for x in (one.value, one.peer_value, one.ratio)
        ]
        table.add_row(one.name, numbers[0], one.unit, one.peer or "-", numbers[1], numbers[2], one.goal, reached)
    console().print(table)
