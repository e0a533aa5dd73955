"""``millstream retention``: apply retention policies once or repeatedly, and show what delays trimming."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.broker import BlockingBroker, Broker, open_broker
from millstream.broker.operations.info import StreamStats, read_stream_stats
from millstream.broker.scripts import retention
from millstream.cli import show
from millstream.cli.lookup import DEADLINE_MS, is_glob, no_stream, opened, refuse_memory_broker, streams_found
from millstream.cli.main import FAILED
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, ago, memory, name, number, text
from millstream.errors import InvalidArgument
from millstream.messaging import Janitor, RetentionPolicy, run_until_signalled
from millstream.messaging.retention import StreamReport
from millstream.model import parse_duration_ms
from millstream.observe.format import duration, made_at, printable
from millstream.observe.stderr_handler import StderrHandler
from millstream.observe.streams import holding_group

app = typer.Typer()

MAX_CONFIG_BYTES = 1 << 20

Streams = Annotated[list[str] | None, typer.Argument(help="Streams, or globs such as 'events.*'.")]
MaxAge = Annotated[str | None, typer.Option("--max-age", help="Remove entries older than this, such as 7d.")]
MaxLen = Annotated[int | None, typer.Option("--max-len", min=0, help="Keep at most this many entries.")]
MaxBytes = Annotated[str | None, typer.Option("--max-bytes", help="Keep at most this much memory, such as 1gb.")]
KeepAcked = Annotated[
    str | None,
    typer.Option("--keep-acked", help="Remove entries that all groups acknowledged this long ago, such as 1h."),
]
HardMaxLen = Annotated[
    int | None,
    typer.Option("--hard-max-len", min=0, help="Maximum number of entries, even if a group still needs them."),
]
HardMaxBytes = Annotated[
    str | None, typer.Option("--hard-max-bytes", help="Maximum memory, even if a group still needs entries.")
]
HardMaxAge = Annotated[
    str | None,
    typer.Option("--hard-max-age", help="Maximum age, such as 30d, even if a group still needs the entries."),
]
DeleteAcked = Annotated[
    bool, typer.Option("--delete-acked", help="Remove entries as soon as all groups acknowledged them.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help="YAML: a mapping from streams or globs to their limits.", exists=True)
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=1,
        max=65535,
        metavar="<port>",
        help="Serve /metrics, /health and /ready on this port of 127.0.0.1.",
    ),
]
DeadAfter = Annotated[str, typer.Option("--dead-after", help="Report a group as dead if it was silent for longer.")]


@app.command("ls")
def list_streams(
    streams: Streams = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """List streams with their length and the group that delays trimming; changes nothing."""
    with opened(url) as broker:
        names = {name: None for pattern in streams or ["*"] for name in streams_found(broker, pattern)}
        now_ms = broker.server_time_ms()
        items = [_status_of(broker, stats) for stats in broker.run(read_stream_stats, list(names))]
    columns = [name("stream"), number("length"), ago("oldest_entry_at", now_ms, "oldest entry")]
    columns += [memory("memory_bytes"), name("trim_waits_for"), number("lag"), number("pending")]
    show.rows(output, [*columns, text("lost", render=_lost)], items)


def _status_of(broker: BlockingBroker, stats: StreamStats) -> dict[str, Any]:
    first = broker.xrange(stats.name, count=1)
    holding = holding_group(stats)
    return {
        "stream": stats.name,
        "length": stats.length,
        "oldest_entry_at": made_at(first[0].id) if first else None,
        "memory_bytes": stats.memory_bytes,
        "trim_waits_for": holding.name if holding else None,
        "lag": holding.lag if holding else None,
        "pending": holding.pending if holding else None,
        "lost": [{"group": group, "count": count} for group, count in broker.run(retention.losses, stats.name).items()],
    }


@app.command()
def apply(
    streams: Streams = None,
    max_age: MaxAge = None,
    max_len: MaxLen = None,
    max_bytes: MaxBytes = None,
    keep_acked: KeepAcked = None,
    hard_max_len: HardMaxLen = None,
    hard_max_bytes: HardMaxBytes = None,
    hard_max_age: HardMaxAge = None,
    delete_acked: DeleteAcked = False,
    config: Config = None,
    dead_after: DeadAfter = "1h",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Apply the policies once, and show the results and the groups that delay trimming."""
    limits: dict[str, object] = {
        "max_age": max_age,
        "max_len": max_len,
        "max_bytes": max_bytes,
        "keep_acked": keep_acked,
    }
    limits |= {"hard_max_len": hard_max_len, "hard_max_bytes": hard_max_bytes, "hard_max_age": hard_max_age}
    limits |= {"delete_acked": delete_acked or None}
    policies = read_policies(streams or [], limits, config)
    silent_ms = parse_duration_ms(dead_after, "--dead-after")

    failed: list[str] = []

    def record_failure(name: str, /, **fields: Any) -> None:
        if name == "messaging.retention_failed":
            failed.append(fields["stream"])

    refuse_memory_broker(url)

    async def work() -> list[dict[str, Any]]:
        async with open_broker(url, deadline_ms=DEADLINE_MS, observer=record_failure) as broker:
            for name in streams or ():
                if not is_glob(name) and not await broker.exists(name):
                    raise await broker.run(no_stream, name)
            reports = await Janitor(broker, policies, dead_after_ms=silent_ms).sweep()
            return [await _row(broker, report) for report in reports]

    columns = [name("stream"), number("dropped"), number("length"), memory("memory_bytes")]
    show.rows(
        output, [*columns, text("held_back_by", render=_holding), text("lost", render=_lost)], asyncio.run(work())
    )
    if failed:  # group was logged as a warning; the other streams are done
        raise typer.Exit(FAILED)


@app.command()
def run(
    streams: Streams = None,
    max_age: MaxAge = None,
    max_len: MaxLen = None,
    max_bytes: MaxBytes = None,
    keep_acked: KeepAcked = None,
    hard_max_len: HardMaxLen = None,
    hard_max_bytes: HardMaxBytes = None,
    hard_max_age: HardMaxAge = None,
    delete_acked: DeleteAcked = False,
    config: Config = None,
    every: Annotated[str, typer.Option("--every", help="Time between two runs.")] = "60s",
    dead_after: DeadAfter = "1h",
    metrics_port: MetricsPort = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Apply the policies repeatedly, until stopped. Several processes may do so at the same time."""
    limits: dict[str, object] = {
        "max_age": max_age,
        "max_len": max_len,
        "max_bytes": max_bytes,
        "keep_acked": keep_acked,
    }
    limits |= {"hard_max_len": hard_max_len, "hard_max_bytes": hard_max_bytes, "hard_max_age": hard_max_age}
    limits |= {"delete_acked": delete_acked or None}
    policies = read_policies(streams or [], limits, config)
    times = {
        "interval_ms": parse_duration_ms(every, "--every"),
        "dead_after_ms": parse_duration_ms(dead_after, "--dead-after"),
    }
    logging.basicConfig(handlers=[StderrHandler()], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # requests to the metrics port are not logged

    async def work() -> None:
        from millstream.observe import ServiceMonitor
        from millstream.observe.metrics import combine_observers

        monitor = ServiceMonitor(port=metrics_port)
        observer = combine_observers([monitor, _log_trims])
        async with open_broker(url, observer=observer) as broker, monitor.watch(broker):
            task = asyncio.ensure_future(Janitor(broker, policies, observer=observer, **times).run())

            async def stop() -> None:
                task.cancel()

            await run_until_signalled(task, stop)

    asyncio.run(work())


def read_policies(streams: list[str], limits: Mapping[str, object], config: Path | None) -> dict[str, RetentionPolicy]:
    """Return the policies by stream. Streams on the command line share its limits and override those of the file."""
    policies: dict[str, RetentionPolicy] = {}
    if streams:
        set_limits = {name: value for name, value in limits.items() if value is not None}
        if not set_limits:
            allowed = ", ".join("--" + name.replace("_", "-") for name in limits)
            raise InvalidArgument("limits", "none", f"at least one of {allowed}")
        policy = RetentionPolicy.parse(set_limits)
        policies = dict.fromkeys(streams, policy)
    if config is not None:
        for name, written in _read_config(config).items():
            if not isinstance(written, dict):
                raise InvalidArgument(f"{config.name}: {name}", written, "a mapping of limits, such as {max_age: 7d}")
            policies.setdefault(str(name), RetentionPolicy.parse(written, argument=f"{config.name}: {name}"))
    if not policies:
        raise InvalidArgument("streams", streams, "streams and limits, or --config with a file")
    return policies


def _read_config(path: Path) -> dict[object, object]:
    import yaml

    with path.open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidArgument("--config", str(path), f"a file of at most {MAX_CONFIG_BYTES} bytes")
    try:
        read = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgument("--config", str(path), f"valid YAML ({str(error)[:200]})") from None
    if not isinstance(read, dict):
        raise InvalidArgument("--config", str(path), "a mapping from streams to limits")
    return read


async def _row(broker: Broker, report: StreamReport) -> dict[str, Any]:
    retained = report.retained
    lost = await broker.run(retention.losses, retained.stream)
    return {
        "stream": retained.stream,
        "dropped": retained.dropped,
        "length": retained.length,
        "memory_bytes": await broker.run(retention.stream_bytes, retained.stream),
        "held_back_by": [
            {"group": group.group, "entries": group.holds_back, "idle_ms": group.idle_ms, "dead": group.dead}
            for group in report.holding
        ],
        "lost": [{"group": group, "count": count} for group, count in lost.items()],
    }


def _holding(groups: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for group in groups:
        silence = "no consumer" if group["idle_ms"] is None else f"silent for {duration(group['idle_ms'])}"
        dead = f", dead: {silence}" if group["dead"] else ""
        parts.append(f"{printable(group['group'])} ({group['entries']:,}{dead})")
    return "; ".join(parts) or "-"


def _lost(groups: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{printable(group['group'])} ({group['count']:,})" for group in groups) or "-"


def _log_trims(name: str, /, **fields: Any) -> None:
    if name == "messaging.trimmed" and fields["dropped"]:
        message = "dropped %d entries of %r, %d are left"
        logging.getLogger("millstream.retention").info(message, fields["dropped"], fields["stream"], fields["length"])
