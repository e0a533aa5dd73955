"""``millstream demo``: a broker, a pipeline and workers, and a ledger that accounts for every message."""

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
        str | None, typer.Option("--url", help="Use this Redis; by default the demo starts an embedded broker.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1000, help="How many changes the pipeline generates.")] = 3_000,
    source: Annotated[
        DemoSource, typer.Option("--source", help="Generated changes, or those of a real PostgreSQL.")
    ] = DemoSource.generator,
    data: Annotated[Path | None, typer.Option("--data", help="Directory for all files of the demo.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Continue with orders after the ledger, until Ctrl-C.")] = False,
) -> None:
    from millstream.cli.pipeline_status import need_spark

    need_spark()
    from millstream.demo import run_demo

    directory = data or Path("demo-data") / datetime.now().strftime("%Y%m%d-%H%M%S")
    ledger = run_demo(url, directory, rows, console(), source=source, keep=keep)
    typer.echo()
    typer.echo(f"All files are in {directory}")
    typer.echo(ledger.line())
    if ledger.lost or ledger.duplicates or ledger.dead_letters != 1:
        raise typer.Exit(FAILED)
