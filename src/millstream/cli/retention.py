"""``millstream retention``: apply policies once or for good, and see what holds entries back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.broker import BlockingBroker, Broker, StreamSurvey, open_broker, retention, survey
from millstream.cli import show
from millstream.cli.lookup import DEADLINE_MS, is_glob, no_stream, opened, something_to_look_at, streams_found
from millstream.cli.main import FAILED
from millstream.cli.show import DEFAULT_URL, Output, OutputKind, Url, ago, memory, name, number, text
from millstream.errors import InvalidArgument
from millstream.messaging import Janitor, RetentionPolicy, StreamReport, run_until_signalled
from millstream.model import parse_duration_ms
from millstream.observe import duration, holding_group, made_at, printable

app = typer.Typer()

MAX_CONFIG_BYTES = 1 << 20

Streams = Annotated[list[str] | None, typer.Argument(help="Streams, or globs such as 'events.*'.")]
MaxAge = Annotated[str | None, typer.Option("--max-age", help="Drop what is older, such as 7d.")]
MaxLen = Annotated[int | None, typer.Option("--max-len", min=0, help="Keep at most so many entries.")]
MaxBytes = Annotated[str | None, typer.Option("--max-bytes", help="Keep at most so much memory, such as 1gb.")]
KeepAcked = Annotated[
    str | None, typer.Option("--keep-acked", help="Drop what every group acknowledged so long ago, such as 1h.")
]
HardMaxLen = Annotated[
    int | None, typer.Option("--hard-max-len", min=0, help="Never more entries, even if a group still needs them.")
]
HardMaxBytes = Annotated[
    str | None, typer.Option("--hard-max-bytes", help="Never more memory, even if a group still needs entries.")
]
HardMaxAge = Annotated[
    str | None, typer.Option("--hard-max-age", help="Nothing older, such as 30d, even if a group still needs it.")
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
        help="Show /metrics, /health and /ready on this port of 127.0.0.1.",
    ),
]
DeadAfter = Annotated[str, typer.Option("--dead-after", help="A group that was silent for longer looks dead.")]


@app.command("ls")
def list_streams(
    streams: Streams = None,
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """How long streams have become, and who keeps them from being trimmed; nothing is changed."""
    with opened(url) as broker:
        names = {one: None for given in streams or ["*"] for one in streams_found(broker, given)}
        now_ms = broker.server_time_ms()
        items = [_status_of(broker, found) for found in broker.run(survey, list(names))]
    columns = [name("stream"), number("length"), ago("oldest_entry_at", now_ms, "oldest entry")]
    columns += [memory("memory_bytes"), name("trim_waits_for"), number("lag"), number("pending")]
    show.rows(output, [*columns, text("lost", shown=_lost)], items)


def _status_of(broker: BlockingBroker, found: StreamSurvey) -> dict[str, Any]:
    first = broker.xrange(found.name, count=1)
    holding = holding_group(found)
    return {
        "stream": found.name,
        "length": found.length,
        "oldest_entry_at": made_at(first[0].id) if first else None,
        "memory_bytes": found.memory_bytes,
        "trim_waits_for": holding.name if holding else None,
        "lag": holding.lag if holding else None,
        "pending": holding.pending if holding else None,
        "lost": [{"group": group, "count": count} for group, count in broker.run(retention.losses, found.name).items()],
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
    config: Config = None,
    dead_after: DeadAfter = "1h",
    url: Url = DEFAULT_URL,
    output: Output = OutputKind.table,
) -> None:
    """Apply the policies once, and show what they did and what holds entries back."""
    limits = {"max_age": max_age, "max_len": max_len, "max_bytes": max_bytes, "keep_acked": keep_acked}
    limits |= {"hard_max_len": hard_max_len, "hard_max_bytes": hard_max_bytes, "hard_max_age": hard_max_age}
    policies = read_policies(streams or [], limits, config)
    silent_ms = parse_duration_ms(dead_after, "--dead-after")

    failed: list[str] = []

    def note(name: str, /, **facts: Any) -> None:
        if name == "messaging.retention_failed":
            failed.append(facts["stream"])

    something_to_look_at(url)

    async def work() -> list[dict[str, Any]]:
        async with open_broker(url, deadline_ms=DEADLINE_MS, observer=note) as broker:
            for name in streams or ():
                if not is_glob(name) and not await broker.exists(name):
                    raise await broker.run(no_stream, name)
            reports = await Janitor(broker, policies, dead_after_ms=silent_ms).sweep()
            return [await _row(broker, report) for report in reports]

    columns = [name("stream"), number("dropped"), number("length"), memory("memory_bytes")]
    show.rows(output, [*columns, text("held_back_by", shown=_holding), text("lost", shown=_lost)], asyncio.run(work()))
    if failed:  # said in a warning each; the others are done
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
    config: Config = None,
    every: Annotated[str, typer.Option("--every", help="How often.")] = "60s",
    dead_after: DeadAfter = "1h",
    metrics_port: MetricsPort = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Apply the policies again and again, until it is stopped. Several at once do no harm."""
    limits = {"max_age": max_age, "max_len": max_len, "max_bytes": max_bytes, "keep_acked": keep_acked}
    limits |= {"hard_max_len": hard_max_len, "hard_max_bytes": hard_max_bytes, "hard_max_age": hard_max_age}
    policies = read_policies(streams or [], limits, config)
    times = {
        "interval_ms": parse_duration_ms(every, "--every"),
        "dead_after_ms": parse_duration_ms(dead_after, "--dead-after"),
    }
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the metrics' port has nothing to say

    async def work() -> None:
        from millstream.observe import ServiceMonitor, together

        monitor = ServiceMonitor(port=metrics_port)
        observer = together([monitor, _log_trims])
        async with open_broker(url, observer=observer) as broker, monitor.watch(broker):
            task = asyncio.ensure_future(Janitor(broker, policies, observer=observer, **times).run())

            async def stop() -> None:
                task.cancel()

            await run_until_signalled(task, stop)

    asyncio.run(work())


def read_policies(streams: list[str], limits: Mapping[str, object], config: Path | None) -> dict[str, RetentionPolicy]:
    """Streams on the command line share its limits and come first; a file gives each its own."""
    policies: dict[str, RetentionPolicy] = {}
    if streams:
        given = {name: value for name, value in limits.items() if value is not None}
        if not given:
            allowed = ", ".join("--" + name.replace("_", "-") for name in limits)
            raise InvalidArgument("limits", "none at all", f"at least one of {allowed}")
        policy = RetentionPolicy.parse(given)
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
            {"group": each.group, "entries": each.holds_back, "idle_ms": each.idle_ms, "dead": each.dead}
            for each in report.holding
        ],
        "lost": [{"group": group, "count": count} for group, count in lost.items()],
    }


def _holding(groups: Sequence[Mapping[str, Any]]) -> str:
    told = []
    for each in groups:
        silence = "no consumer" if each["idle_ms"] is None else f"silent for {duration(each['idle_ms'])}"
        dead = f", dead: {silence}" if each["dead"] else ""
        told.append(f"{printable(each['group'])} ({each['entries']:,}{dead})")
    return "; ".join(told) or "-"


def _lost(groups: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{printable(each['group'])} ({each['count']:,})" for each in groups) or "-"


def _log_trims(name: str, /, **facts: Any) -> None:
    if name == "messaging.trimmed" and facts["dropped"]:
        message = "dropped %d entries of %r, %d are left"
        logging.getLogger("millstream.retention").info(message, facts["dropped"], facts["stream"], facts["length"])
