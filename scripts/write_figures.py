"""Puts the output of ``millstream bench --json`` into the README: ``python scripts/write_figures.py FILE...``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from millstream.bench.result import Result

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
MISSED = ", missed"
"""Behind a goal that was not reached: nobody has to compare the numbers to find out."""


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def reached(one: dict[str, Any]) -> bool | None:
    return Result(one["name"], one["value"], one["unit"], one["peer"], one["peer_value"], one["goal"]).reached


def table(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    lines = [
        f"On {machine['cores']} cores ({machine['arch']}), Python {machine['python']}, "
        f"redis-server {machine['redis_server']}; ours and the peer in the same run, in turn, medians.",
        "",
        "| what | ours | unit | peer | peer's | ratio | goal |",
        "|---|---:|---|---|---:|---:|---|",
    ]
    for one in results:
        ours, peers = number(one["value"]), number(one["peer_value"])
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
        cells = (
            f"`{one['name']}`",
            ours,
            one["unit"],
            one["peer"] or "-",
            peers,
            ratio,
            one["goal"] + (MISSED if reached(one) is False else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    results = [one for run in runs for one in run["results"]]
    text = f"{BEGIN}\n{table(runs[0]['machine'], results)}\n{END}"
    before = README.read_text()
    pattern = re.compile(f"{BEGIN}(.*?{END})?", re.DOTALL)
    README.write_text(pattern.sub(lambda _: text, before, count=1))


if __name__ == "__main__":
    main()
