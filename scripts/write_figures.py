"""Puts the output of ``python -m benchmarks --json`` into the README: ``python scripts/write_figures.py FILE...``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT))
from benchmarks import Result  # noqa: E402

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
MISSED = ", missed"
"""Follows a goal that was not reached."""
IN_WORDS = {
    "embedded_xadd": "add an entry, embedded broker",
    "engine_xadd": "the same, the engine alone",
    "embedded_readgroup_ack": "group read and acknowledge, embedded",
    "server_xadd": "add over the network, `millstream serve`",
    "server_xadd_pipelined": "the same, pipelined",
    "xadd_many": "add many entries to Redis",
    "xadd_many_ceiling": "the same, compared with redis-benchmark",
    "flat_cost": "slowest operation, long stream against short stream",
    "memory_85b": "memory per entry of 85 bytes",
    "memory_5x20b": "memory per entry of five fields",
    "consume_ack": "handle and acknowledge messages",
    "consume_ack_bare": "the same, compared with a loop without a framework",
    "embedded_consume_ack": "handle and acknowledge messages, embedded broker",
    "topics_1000_start_s": "start to read 1,000 topics",
    "topics_10000_start_s": "start to read 10,000 topics",
    "topics_connections": "connections for 10,000 topics",
    "topics_idle": "10,000 idle topics",
    "topics_sparse": "500 messages a second over 10,000 topics",
    "topics_throughput": "handle 1,000 busy topics",
    "takeover_million": "handle a million entries of a dead consumer",
    "cluster_topics_start_s": "Cluster: start to read 1,000 topics",
    "cluster_topics_connections": "Cluster: connections for 1,000 topics",
    "cluster_topics_idle": "Cluster: 1,000 idle topics",
    "cluster_topics_sparse": "Cluster: 500 messages a second over 1,000 topics",
    "cluster_topics_throughput": "Cluster: handle 1,000 busy topics",
    "assigned_10000": "read 10,000 streams of a dead owner again",
    "topics_round_trip": "publish to 1,000 topics and handle everything",
    "publish_100": "publish in batches of 100",
    "latency_p50_ms": "publish to handler, p50 latency",
    "latency_p99_ms": "publish to handler, p99 latency",
    "big_pending": "slow-down by a long pending entries list",
    "takeover_s": "take-over of a dead owner's streams",
    "renew_10000": "renew 10,000 leases",
    "place_10000": "spread 10,000 streams over members",
    "spark_read": "read into Spark",
    "spark_streams_10000": "read 10,000 streams into Spark",
    "spark_copy": "copy a stream with Spark, exactly once",
    "spark_latency_p50_ms": "stream to stream through Spark, p50 latency",
    "spark_memory": "peak memory for ten times the data",
    "pipeline_first_event_s": "start of a pipeline, from the command to the first entry",
    "first_event_command_s": "of that: the command itself",
    "first_event_session_s": "of that: Spark's session",
    "first_event_source_s": "of that: the source",
    "first_event_batch_s": "of that: the first batch",
    "pipeline_generator": "pipeline, end to end",
    "second_sink": "cost of a second sink",
    "cdc_postgres": "changes of PostgreSQL to Redis",
    "cdc_decode": "decode the log of PostgreSQL",
    "cdc_snapshot": "snapshot of a PostgreSQL table to Redis",
    "cdc_mariadb": "changes of MariaDB to Redis",
    "cdc_flat": "cost of the last batches of a backlog against the first",
    "cdc_latency_p50_ms": "commit in PostgreSQL to entry in Redis, p50 latency",
    "cdc_latency_p99_ms": "commit in PostgreSQL to entry in Redis, p99 latency",
    "tpcc_ledger": "TPC-C-like transactions to Redis, tables rebuilt exactly",
}
"""Description of each figure."""


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def reached(result: dict[str, Any]) -> bool | None:
    return Result(
        result["name"], result["value"], result["unit"], result["peer"], result["peer_value"], result["goal"]
    ).reached


def table(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    lines = [
        f"On {machine['cores']} cores ({machine['arch']}), Python {machine['python']}, "
        f"redis-server {machine['redis_server']}; ours and the peer interleaved in the same run, medians.",
        "",
        "| what | ours | unit | peer | peer's | ratio | goal |",
        "|---|---:|---|---|---:|---:|---|",
    ]
    for result in results:
        ours, peers = number(result["value"]), number(result["peer_value"])
        ratio = "-" if result["ratio"] is None else f"{result['ratio']:.2f}"
        cells = (
            f"{IN_WORDS[result['name']]} (`{result['name']}`)" if result["name"] in IN_WORDS else f"`{result['name']}`",
            ours,
            result["unit"],
            result["peer"] or "-",
            peers,
            ratio,
            result["goal"] + (MISSED if reached(result) is False else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    results = [result for run in runs for result in run["results"]]
    text = f"{BEGIN}\n{table(runs[0]['machine'], results)}\n{END}"
    before = README.read_text()
    pattern = re.compile(f"{BEGIN}(.*?{END})?", re.DOTALL)
    README.write_text(pattern.sub(lambda _: text, before, count=1))


if __name__ == "__main__":
    main()
