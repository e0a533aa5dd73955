"""``millstream top``: streams, rates, lag, oldest pending, memory, and who holds back trimming, live."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.cli import show
from millstream.cli.lookup import opened
from millstream.cli.options import DEFAULT_URL, MOST_SECONDS, Output, OutputKind, Url
from millstream.cli.terminal import UntilInterrupted
from millstream.observe import Look, Row, count_of, duration, look, printable, rows, size


def command(
    pattern: Annotated[str, typer.Argument(help="A glob, such as 'orders*'.")] = "*",
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, max=MOST_SECONDS, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    with opened(url) as broker:
        before: Look | None = None
        now = broker.run(look, pattern)
        if once or output is OutputKind.json:
            time.sleep(interval_s)
            before, now = now, broker.run(look, pattern)
            if output is OutputKind.json:
                show.as_json([row._asdict() for row in rows(now, before)])
            else:
                show.console().print(picture(now, before, None))
            return
        console = show.console()
        screen = Live(picture(now, before, console.height), console=console, screen=True, auto_refresh=False)
        with screen as live, UntilInterrupted() as going:
            while going:
                time.sleep(interval_s)
                before, now = now, broker.run(look, pattern)
                live.update(picture(now, before, console.height), refresh=True)


def picture(now: Look, before: Look | None, height: int | None) -> Group:
    """Cut to a screen of ``height`` lines; without one all of it, for a look that ends."""
    found = rows(now, before)
    limit = f" of {size(now.max_memory)}" if now.max_memory else ""
    server = f"memory {size(now.used_memory)}{limit}   {now.blocked_clients} readers waiting"
    if not now.used_memory:
        server = "memory unknown (no right to INFO)"
    head = Text.assemble(("millstream top", "bold"), f"   {count_of(len(found), 'stream', 'streams')}   {server}")
    table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
    for column in (
        "stream",
        "length",
        "in/s",
        "groups",
        "lag",
        "pending",
        "oldest",
        "memory",
        "trim waits for",
    ):
        table.add_column(
            column,
            justify="left" if column in ("stream", "trim waits for") else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    shown = found if height is None else found[: max(1, height - 5)]
    for row in shown:
        table.add_row(*_cells(row))
    foot = Text(f"… {len(found) - len(shown):,} more; Ctrl-C ends" if len(shown) < len(found) else "Ctrl-C ends", "dim")
    return Group(head, Text(), table, *(() if height is None else (foot,)))


def _cells(row: Row) -> list[Text]:
    late = row.oldest_pending_ms is not None and row.oldest_pending_ms > 60_000
    return [
        Text(printable(row.stream)),
        Text(f"{row.length:,}"),
        Text("-" if row.added_per_s is None else f"{row.added_per_s:,.0f}"),
        Text(f"{row.groups:,}"),
        Text("-" if row.lag is None else f"{row.lag:,}", "yellow" if row.lag else ""),
        Text(f"{row.pending:,}"),
        Text("-" if row.oldest_pending_ms is None else duration(row.oldest_pending_ms), "red" if late else ""),
        Text("-" if row.memory_bytes is None else size(row.memory_bytes)),
        Text("-" if row.holds_back is None else printable(row.holds_back)),
    ]
