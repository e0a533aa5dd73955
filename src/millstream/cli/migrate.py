"""``millstream migrate``: an embedded broker's streams, groups and pending lists, moved to Redis and checked."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.options import Output, OutputKind
from millstream.observe import count_of


def command(
    source: Annotated[str, typer.Option("--from", help="The embedded broker: local:///path. It must not be open.")],
    target: Annotated[str, typer.Option("--to", help="The Redis: redis://host:port and its kin.")],
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="Pass over keys that are there already and the same.")
    ] = False,
    output: Output = OutputKind.table,
) -> None:
    """Move an embedded broker's data to Redis.

    Keys that exist in the target are refused before anything is written. Afterwards lengths, counters, groups, pending
    lists and every entry are compared.
    """
    from millstream.broker import migrate

    began = time.monotonic()
    with _Bar(shown=output is OutputKind.table and sys.stderr.isatty()) as bar:
        report = migrate(source, target, skip_existing=skip_existing, progress=bar.tell)
    seconds = time.monotonic() - began
    moved = (
        f"{count_of(report.streams, 'stream', 'streams')} with {count_of(report.entries, 'entry', 'entries')}",
        count_of(report.groups, "group", "groups"),
        count_of(report.consumers, "consumer", "consumers"),
        count_of(report.pending, "pending entry", "pending entries"),
        count_of(report.other_keys, "other key", "other keys"),
    )
    skipped = f"; {count_of(report.skipped, 'key was', 'keys were')} there already" if report.skipped else ""
    show.outcome(
        output,
        f"moved {', '.join(moved)}{skipped}; compared with the target, all the same ({seconds:.1f} s)",
        **asdict(report),
        seconds=round(seconds, 3),
    )


class _Bar:
    """Progress for people who watch; silence for pipes."""

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[key]}", markup=False),
            console=Console(stderr=True), disable=not shown, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("moving", key="")

    def tell(self, name: str, done: int, total: int) -> None:
        shown = name.encode("ascii", "backslashreplace").decode()[:60]
        self._progress.update(self._task, completed=done, total=total, key=shown)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
