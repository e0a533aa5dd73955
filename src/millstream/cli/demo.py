"""``millstream demo``: the whole product at work, and a ledger that says what became of every message."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.main import FAILED
from millstream.cli.show import console


class DemoSource(StrEnum):
    generator = "generator"
    postgres = "postgres"


def command(
    url: Annotated[
        str | None, typer.Option("--url", help="Run on this Redis; by default on an embedded broker of its own.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1000, help="How many changes the pipeline makes up.")] = 3_000,
    source: Annotated[
        DemoSource, typer.Option("--source", help="Made-up changes, or a real PostgreSQL's.")
    ] = DemoSource.generator,
    data: Annotated[Path | None, typer.Option("--data", help="Where to keep everything.")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on with orders after the ledger, to look at, until Ctrl-C.")
    ] = False,
) -> None:
    from millstream.cli.pipeline_status import need_spark

    need_spark()
    from millstream.demo import run_demo

    directory = data or Path("demo-data") / datetime.now().strftime("%Y%m%d-%H%M%S")
    ledger = run_demo(url, directory, rows, console(), source=source, keep=keep)
    typer.echo()
    typer.echo(f"Everything is kept in {directory}")
    typer.echo(ledger.line())
    if ledger.lost or ledger.duplicates or ledger.buried != 1:
        raise typer.Exit(FAILED)
