"""Draws the images under docs/images: the output of commands on a server with sample streams."""

from __future__ import annotations

import os
import re
import sys
import time
from io import StringIO
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

from millstream import BlockingBroker, open_blocking_broker
from millstream.cli.top import picture
from millstream.messaging.failure import DeadLetterDetails, dead_letter_fields
from millstream.observe.streams import read_all_streams
from millstream.testing import RedisProcess

PICTURES = Path(__file__).parents[1] / "docs" / "images"


def fill(broker: BlockingBroker) -> None:
    for name, length, groups, read, done in (
        ("orders", 12_000, ("billing", "shipping"), 11_500, 11_480),
        ("payments", 9_000, ("ledger",), 9_000, 9_000),
        ("audit", 40_000, ("archive",), 2_000, 2_000),
        ("notifications", 3_000, ("mail", "push"), 3_000, 2_990),
    ):
        broker.xadd_many(name, [{"event": f'{{"id": {n}, "total": 129.95}}'} for n in range(length)])
        for group in groups:
            broker.create_group(name, group, start="0")
            deliveries = broker.xreadgroup(name, group, "worker-1", count=read)
            if done:
                broker.xack(name, group, [delivery.id for delivery in deliveries[:done]])


def add_dead_letters(broker: BlockingBroker) -> None:
    """Add dead letters of two errors."""
    for n in range(14):
        error, kind = (
            (f"card {n} was declined", "shop.CardDeclined") if n % 3 else ("timed out after 5 s", "TimeoutError")
        )
        details = DeadLetterDetails("orders", f"{n + 1}-0", "billing", "worker-1", 5, error, kind, "", 0)
        broker.xadd("{orders}.dlq", dead_letter_fields({b"payload": b"{}"}, details))


def draw(name: str, console: Console, title: str) -> None:
    drawn = console.export_svg(title=title)
    # Remove web fonts, so that the image loads nothing; any monospaced font will do.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)
    (PICTURES / name).write_text(re.sub(r"\n\s*\n+", "\n", drawn))


def run_commands(url: str, *commands: str) -> Console:
    """Record the output of commands on a terminal of 96 columns."""
    console = Console(record=True, width=96, file=StringIO())
    environment = {**os.environ, "MILLSTREAM_URL": url, "TERM": "xterm", "COLUMNS": "96"}
    for command in commands:
        line = f"{sys.executable} -m millstream {command}"
        output = pexpect.run(line, env=environment, timeout=60, encoding="utf-8")
        console.print(Text(f"$ millstream {command}", "bold green"))
        console.print(Text.from_ansi(str(output).replace("\r", "")))
    return console


def main() -> None:
    with RedisProcess() as server, open_blocking_broker(server.url) as broker:
        fill(broker)
        add_dead_letters(broker)
        before = broker.run(read_all_streams, "*")
        broker.xadd_many("orders", [{"event": "{}"}] * 640)
        broker.xadd_many("audit", [{"event": "{}"}] * 1_900)
        time.sleep(1)
        console = Console(record=True, width=96, file=StringIO())
        console.print(picture(broker.run(read_all_streams, "*"), before, width=96, height=20))
        draw("top.svg", console, "millstream top")
        draw("dlq.svg", run_commands(server.url, "dlq ls", "dlq errors orders"), "millstream dlq")
        time.sleep(21)  # longer than a live consumer would be silent
        draw("doctor.svg", run_commands(server.url, "doctor orders"), "millstream doctor")


if __name__ == "__main__":
    main()
