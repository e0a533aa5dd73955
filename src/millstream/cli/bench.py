"""``millstream bench``: run the suites, show a table or one JSON object."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.exit_codes import FAILED
from millstream.cli.show import Output, OutputKind, ShownColumn, flag, text


class Suite(StrEnum):
    broker = "broker"
    messaging = "messaging"
    assignment = "assignment"
    spark = "spark"
    pipeline = "pipeline"
    cdc = "cdc"
    dashboard = "dashboard"


def command(
    suites: Annotated[list[Suite] | None, typer.Argument(help="Which suites; all of them by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, as -o json does.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of ours and the peer in turn; the median counts.")] = 3,
    output: Output = OutputKind.table,
) -> None:
    from millstream.bench import Result, machine

    results: list[Result] = []
    for suite in suites or list(Suite):
        typer.secho(f"{suite}:", bold=True, err=True)
        try:
            module = importlib.import_module(f"millstream.bench.{suite}")
        except ModuleNotFoundError as error:
            typer.secho(f"  {error.name} is not installed. Run: pip install --group bench", fg="red", err=True)
            raise typer.Exit(FAILED) from None
        results += module.run(rounds, lambda text: typer.secho(f"  {text}", dim=True, err=True))
    if as_json or output is OutputKind.json:
        json.dump({"machine": machine(), "results": [result.as_json() for result in results]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    items = [{**result.as_json(), "reached": result.reached} for result in results]
    figure = ShownColumn("value", "value", "not", True, False, _figure)
    columns = [ShownColumn("name", "name", "not"), figure, text("unit"), replace(figure, key="ratio", title="ratio")]
    columns += [ShownColumn("goal", "goal", "not"), flag("reached"), text("peer", spare=True)]
    show.table([*columns, replace(figure, key="peer_value", title="peer's", spare=True)], items)


def _figure(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
