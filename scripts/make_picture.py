"""Draws the pictures under docs/images: what commands show of a real server with a few streams at work."""

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
from millstream.messaging.failure import Burial, bury_with
from millstream.observe.streams import look
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
            held = broker.xreadgroup(name, group, "worker-1", count=read)
            if done:
                broker.xack(name, group, [delivery.id for delivery in held[:done]])


def killed(broker: BlockingBroker) -> None:
    """Dead letters, and a consumer that has been silent for longer than a living one would be."""
    for n in range(14):
        error, kind = (
            (f"card {n} was declined", "shop.CardDeclined") if n % 3 else ("timed out after 5 s", "TimeoutError")
        )
        burial = Burial("orders", f"{n + 1}-0", "billing", "worker-1", 5, error, kind, "", 0)
        broker.xadd("{orders}.dlq", bury_with({b"payload": b"{}"}, burial))


def draw(name: str, console: Console, title: str) -> None:
    drawn = console.export_svg(title=title)
    # A picture that loads nothing: the fonts that rich names are elsewhere, any monospaced one will do.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)
    (PICTURES / name).write_text(re.sub(r"\n\s*\n+", "\n", drawn))


def typed(url: str, *commands: str) -> Console:
    """What a terminal of 96 columns shows when these are typed."""
    console = Console(record=True, width=96, file=StringIO())
    environment = {**os.environ, "MILLSTREAM_URL": url, "TERM": "xterm", "COLUMNS": "96"}
    for command in commands:
        line = f"{sys.executable} -m millstream {command}"
        shown = pexpect.run(line, env=environment, timeout=60, encoding="utf-8")
        console.print(Text(f"$ millstream {command}", "bold green"))
        console.print(Text.from_ansi(str(shown).replace("\r", "")))
    return console


def main() -> None:
    with RedisProcess() as server, open_blocking_broker(server.url) as broker:
        fill(broker)
        killed(broker)
        before = broker.run(look, "*")
        broker.xadd_many("orders", [{"event": "{}"}] * 640)
        broker.xadd_many("audit", [{"event": "{}"}] * 1_900)
        time.sleep(1)
        console = Console(record=True, width=96, file=StringIO())
        console.print(picture(broker.run(look, "*"), before, width=96, height=20))
        draw("top.svg", console, "millstream top")
        draw("dlq.svg", typed(server.url, "dlq ls", "dlq errors orders"), "millstream dlq")
        time.sleep(21)  # a living consumer would have asked by now
        draw("doctor.svg", typed(server.url, "doctor orders"), "millstream doctor")


if __name__ == "__main__":
    main()
