"""``millstream top``: live table of streams with rates, lag, pending entries, memory, and the group that delays
trimming. It runs until q or Ctrl-C.
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
    MAX_SECONDS,
    Column,
    Output,
    OutputKind,
    Url,
    cut,
    lay_out,
    memory,
    name,
    number,
    span,
)
from millstream.errors import MillstreamError
from millstream.observe.format import count_of, harmless, size
from millstream.observe.streams import StatsReading, StreamRow, read_all_streams, stream_rows

OLD_PENDING_MS = 60_000
COLUMNS = (
    name("stream"),
    number("length"),
    Column("added_per_s", "in/s", "not", True, False, lambda value: f"{value:,.0f}"),
    number("lag"),
    number("pending"),
    span("oldest_pending_ms", "oldest"),
    memory("memory_bytes"),
    name("holds_back", "held back by", spare=True),
    number("groups", spare=True),
    number("assigned_streams", "assigned", spare=True),
)


def command(
    pattern: Annotated[str, typer.Argument(help="A glob, such as 'orders*'.")] = "*",
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, max=MAX_SECONDS, help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print, and end.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    with opened(url) as broker:
        now = broker.run(read_all_streams, pattern)
        if not once and output is OutputKind.table and sys.stdout.isatty():
            _live(broker, pattern, interval_s, now)
            return
        time.sleep(interval_s)
        before, now = now, broker.run(read_all_streams, pattern)
        if output is OutputKind.json:
            show.as_json([row._asdict() for row in stream_rows(now, before)])
        else:
            # Rich assumes 80 columns without a terminal, and would cut the lines there.
            width = show.screen_width()
            show.console().print(picture(now, before, width, None), soft_wrap=width is None)


def _live(broker: BlockingBroker, pattern: str, interval_s: float, now: StatsReading) -> None:
    """Update the screen until q or Ctrl-C. If the server is unreachable, the last values stay, with a message."""
    console = show.console()
    before: StatsReading | None = None
    away: str | None = None
    first = picture(now, before, console.width, console.height)
    screen = Live(first, console=console, screen=True, auto_refresh=False)
    with screen as live, Keys() as keys, UntilInterrupted() as running:
        while running and "q" not in keys.wait(interval_s).lower():
            try:
                before, now = now, broker.run(read_all_streams, pattern)
                away = None
            except MillstreamError as error:
                if not error.retryable:
                    raise
                away = harmless(str(error))
            live.update(picture(now, before, console.width, console.height, away), refresh=True)


def picture(
    now: StatsReading, before: StatsReading | None, width: int | None, height: int | None, away: str | None = None
) -> Group:
    """Render one reading, cut to ``height`` lines; None: without a limit, for ``--once``."""
    rows = stream_rows(now, before)
    limit = f" of {size(now.max_memory)}" if now.max_memory else ""
    waiting = count_of(now.blocked_clients, "reader", "readers")
    server = f"memory {size(now.used_memory)}{limit}   {waiting} waiting"
    if not now.used_memory:
        server = "memory unknown (this user may not run INFO)"
    head = Text.assemble(("millstream top", "bold"), f"   {count_of(len(rows), 'stream', 'streams')}   {server}")
    if away is not None:
        message = f"The server is unreachable; retrying. These are the last values. ({away})"
        head.append("\n" + cut(message, width or len(message), "end"), "red")
    visible = rows if height is None else rows[: max(1, height - 5 - (away is not None) * 2)]
    footer = f"… {len(rows) - len(visible):,} more; q quits" if len(visible) < len(rows) else "q quits"
    table = _table(visible, width)
    return Group(head, Text(), *table, *(() if height is None else (Text(footer, "dim"),)))


def _table(rows: list[StreamRow], width: int | None) -> list[Text]:
    layout = lay_out(COLUMNS, [row._asdict() for row in rows], width)
    lines = [Text(layout.header(), "bold", no_wrap=True)]
    for row, cells in zip(rows, layout.cells, strict=True):
        styles = {
            "lag": "yellow" if row.lag else "",
            "oldest_pending_ms": "red"
            if row.oldest_pending_ms is not None and row.oldest_pending_ms > OLD_PENDING_MS
            else "",
        }
        line = Text(no_wrap=True)
        for at, (column, cell) in enumerate(zip(layout.columns, cells, strict=True)):
            line.append(" " * GAP * (at > 0))
            line.append(layout.padded(at, cell), styles.get(column.key, ""))
        lines.append(line)
    return lines


class UntilInterrupted:
    """``with UntilInterrupted() as running: while running: ...`` ends at Ctrl-C, at once and without an error.

    The interrupt is stored as well as raised, because Python drops an exception that is raised in a destructor.
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
    """``with Keys() as keys: keys.wait(2.0)`` returns a key as soon as it is pressed, or "" after the timeout.

    Without a terminal it only waits. The terminal's mode is restored when the block ends.
    """

    def __enter__(self) -> Self:
        self._is_terminal = sys.stdin.isatty()
        if self._is_terminal:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        if not self._is_terminal:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
