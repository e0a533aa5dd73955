"""``millstream top``: streams, rates, lag, oldest pending, memory, and who holds back trimming, live; until Ctrl-C or
a key.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType, TracebackType
from typing import Annotated, Self

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from millstream.broker import BlockingBroker
from millstream.cli import show
from millstream.cli.lookup import opened
from millstream.cli.show import (
    DEFAULT_URL,
    GAP,
    MOST_SECONDS,
    Output,
    OutputKind,
    ShownColumn,
    Url,
    cut,
    lay_out,
    memory,
    name,
    number,
    span,
)
from millstream.errors import MillstreamError
from millstream.observe import Look, Row, count_of, harmless, look, rows, size

LATE_MS = 60_000
COLUMNS = (
    name("stream"),
    number("length"),
    ShownColumn("added_per_s", "in/s", "not", True, False, lambda value: f"{value:,.0f}"),
    number("lag"),
    number("pending"),
    span("oldest_pending_ms", "oldest"),
    memory("memory_bytes"),
    name("holds_back", "held back by", spare=True),
    number("groups", spare=True),
)


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
        now = broker.run(look, pattern)
        if not once and output is OutputKind.table:
            _live(broker, pattern, interval_s, now)
            return
        time.sleep(interval_s)
        before, now = now, broker.run(look, pattern)
        if output is OutputKind.json:
            show.as_json([row._asdict() for row in rows(now, before)])
        else:
            show.console().print(picture(now, before, show.screen_width(), None))


def _live(broker: BlockingBroker, pattern: str, interval_s: float, now: Look) -> None:
    """Until q or Ctrl-C. A server that goes away is waited for: what it showed last stays, and a line says so."""
    console = show.console()
    before: Look | None = None
    away: str | None = None
    first = picture(now, before, console.width, console.height)
    screen = Live(first, console=console, screen=True, auto_refresh=False)
    with screen as live, Keys() as keys, UntilInterrupted() as going:
        while going and "q" not in keys.wait(interval_s).lower():
            try:
                before, now = now, broker.run(look, pattern)
                away = None
            except MillstreamError as error:
                if not error.retryable:
                    raise
                away = harmless(str(error))
            live.update(picture(now, before, console.width, console.height, away), refresh=True)


def picture(now: Look, before: Look | None, width: int | None, height: int | None, away: str | None = None) -> Group:
    """Cut to a screen of ``height`` lines; without one all of it, for a look that ends."""
    found = rows(now, before)
    limit = f" of {size(now.max_memory)}" if now.max_memory else ""
    waiting = count_of(now.blocked_clients, "reader", "readers")
    server = f"memory {size(now.used_memory)}{limit}   {waiting} waiting"
    if not now.used_memory:
        server = "memory unknown (no right to INFO)"
    head = Text.assemble(("millstream top", "bold"), f"   {count_of(len(found), 'stream', 'streams')}   {server}")
    if away is not None:
        told = f"The server is away; waiting for it. These are the last figures. ({away})"
        head.append("\n" + cut(told, width or len(told), "end"), "red")
    shown = found if height is None else found[: max(1, height - 5 - (away is not None) * 2)]
    more = f"… {len(found) - len(shown):,} more; q quits" if len(shown) < len(found) else "q quits"
    table = _table(shown, width)
    return Group(head, Text(), *table, *(() if height is None else (Text(more, "dim"),)))


def _table(shown: list[Row], width: int | None) -> list[Text]:
    laid = lay_out(COLUMNS, [row._asdict() for row in shown], width)
    lines = [Text(laid.header(), "bold", no_wrap=True)]
    for row, cells in zip(shown, laid.cells, strict=True):
        styles = {
            "lag": "yellow" if row.lag else "",
            "oldest_pending_ms": "red" if row.oldest_pending_ms is not None and row.oldest_pending_ms > LATE_MS else "",
        }
        line = Text(no_wrap=True)
        for at, (column, cell) in enumerate(zip(laid.columns, cells, strict=True)):
            line.append(" " * GAP * (at > 0))
            line.append(laid.padded(at, cell), styles.get(column.key, ""))
        lines.append(line)
    return lines


class UntilInterrupted:
    """``with UntilInterrupted() as going: while going: ...`` ends at Ctrl-C, at once and without an error.

    The interrupt is remembered as well as raised: Python drops what is raised while it tidies an object away.
    """

    def __init__(self) -> None:
        self._interrupted = False

    def __bool__(self) -> bool:
        return not self._interrupted

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        signal.signal(signal.SIGINT, self._before)
        return self._interrupted and kind is KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


class Keys:
    """``with Keys() as keys: keys.wait(2.0)`` gives a key as soon as it is pressed, or nothing when the time is over.

    Where nobody sits at the terminal it only waits. The terminal is as it was when the block ends.
    """

    def __enter__(self) -> Self:
        self._here = sys.stdin.isatty()
        if self._here:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        if not self._here:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
