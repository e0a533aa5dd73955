"""``python -m benchmarks``: runs the suites, shows a table or one JSON object."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from benchmarks import Result, machine
from millstream.cli import show
from millstream.cli.show import Column, Output, OutputKind, flag, text


class Suite(StrEnum):
    broker = "broker"
    messaging = "messaging"
    assignment = "assignment"
    spark = "spark"
    pipeline = "pipeline"
    cdc = "cdc"
    cdc_latency = "cdc_latency"
    tpcc = "tpcc"
    dashboard = "dashboard"
    service = "service"


def command(
    suites: Annotated[
        list[Suite] | None,
        typer.Argument(help=f"Which of {', '.join(Suite)}; all of them by default.", show_choices=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, as -o json does.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of ours and the peer in turn; the median counts.")] = 3,
    output: Output = OutputKind.table,
) -> None:
    """Measure this checkout, next to its peers, in the same run."""
    results: list[Result] = []
    for suite in suites or list(Suite):
        typer.secho(f"{suite}:", bold=True, err=True)
        try:
            module = importlib.import_module(f"benchmarks.{suite}")
        except ModuleNotFoundError as error:
            typer.secho(f"  {error.name} is not installed. Run: pip install --group bench", fg="red", err=True)
            raise typer.Exit(1) from None
        results += module.run(rounds, lambda text: typer.secho(f"  {text}", dim=True, err=True))
    if as_json or output is OutputKind.json:
        json.dump({"machine": machine(), "results": [result.as_json() for result in results]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    show.table(*table_of(results))


def table_of(results: Sequence[Result]) -> tuple[list[Column], list[dict[str, Any]]]:
    """Rows of the table. Text in brackets after a unit is a remark, which is dropped first on a narrow screen."""
    items = []
    for result in results:
        unit, _, remark = result.unit.partition(" (")
        shown_fields = {"unit": unit, "remark": remark.removesuffix(")") or None, "reached": result.reached}
        items.append({**result.as_json(), **shown_fields})
    figure = Column("value", "value", "not", True, False, _figure)
    columns = [Column("name", "name", "not"), figure, Column("unit", "unit", "not")]
    columns += [replace(figure, key="ratio", title="ratio"), Column("goal", "goal", "not"), flag("reached")]
    columns += [text("peer", spare=True), replace(figure, key="peer_value", title="peer's", spare=True)]
    remarks = [text("remark", spare=True)] if any(item["remark"] for item in items) else []
    return [*columns, *remarks], items


def _figure(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    typer.run(command)
