"""Puts the output of ``millstream bench --json`` into the README: ``python scripts/write_figures.py FILE...``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from millstream.bench import Result

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
MISSED = ", missed"
"""Behind a goal that was not reached: nobody has to compare the numbers to find out."""
IN_WORDS = {
    "embedded_xadd": "add an entry, embedded broker",
    "engine_xadd": "the same, the engine alone",
    "embedded_readgroup_ack": "read in a group and acknowledge, embedded",
    "server_xadd": "add over the network, `millstream serve`",
    "server_xadd_pipelined": "the same, pipelined",
    "xadd_many": "add many entries to Redis",
    "xadd_many_ceiling": "the same, beside the fastest client there is",
    "flat_cost": "what the slowest operation costs more on a long stream than on a short one",
    "memory_85b": "memory for an entry of 85 bytes",
    "memory_5x20b": "memory for an entry of five fields",
    "consume_ack": "handle and acknowledge messages",
    "consume_ack_bare": "the same, beside a loop without any framework",
    "publish_100": "publish in batches of 100",
    "latency_p50_ms": "from publish to handler, half of them within",
    "latency_p99_ms": "the same, 99 of 100 within",
    "big_pending": "handling beside a long list of pending messages",
    "takeover_s": "until a dead owner's stream has another",
    "renew_10000": "renew 10,000 leases",
    "place_10000": "spread 10,000 streams over members",
    "spark_read": "read into Spark",
    "spark_copy": "copy a stream with Spark, exactly once",
    "spark_latency_p50_ms": "through Spark, half of them within",
    "spark_memory": "memory for ten times the data",
    "pipeline_generator": "a pipeline from end to end",
    "second_sink": "what a second sink costs",
}
"""What each figure says; a name alone says nothing to a newcomer."""


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
            f"{IN_WORDS[one['name']]} (`{one['name']}`)" if one["name"] in IN_WORDS else f"`{one['name']}`",
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
