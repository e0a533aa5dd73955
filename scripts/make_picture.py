"""Draws docs/images/top.svg: what `millstream top` shows of a real server with a few streams at work."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rich.console import Console

from millstream import BlockingBroker, open_blocking_broker
from millstream.cli.top import picture
from millstream.observe.watch import look
from millstream.testing import RedisProcess

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "top.svg"


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


def main() -> None:
    with RedisProcess() as server, open_blocking_broker(server.url) as broker:
        fill(broker)
        before = broker.run(look, "*")
        broker.xadd_many("orders", [{"event": "{}"}] * 640)
        broker.xadd_many("audit", [{"event": "{}"}] * 1_900)
        time.sleep(1)
        console = Console(record=True, width=100)
        console.print(picture(broker.run(look, "*"), before, width=100, height=20))
    drawn = console.export_svg(title="millstream top")
    # A picture that loads nothing: the fonts that rich names are elsewhere, any monospaced one will do.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)
    PICTURE.write_text(re.sub(r"\n\s*\n+", "\n", drawn))


if __name__ == "__main__":
    main()
