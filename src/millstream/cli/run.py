"""``millstream run shop.app:router --processes 4``: workers in processes of their own, kept alive, ended in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli import early_signals, show
from millstream.cli.main import FAILED, USAGE
from millstream.cli.pipeline_status import TokenFile, token_in
from millstream.cli.show import Output, OutputKind, name
from millstream.errors import InvalidArgument, MillstreamError


def command(
    target: Annotated[str, typer.Argument(help="What to run, as package.module:name, such as shop.app:router.")],
    processes: Annotated[
        int,
        typer.Option("--processes", "-p", envvar="MILLSTREAM_PROCESSES", min=1, max=1024, help="How many processes."),
    ] = 1,
    url: Annotated[
        str | None, typer.Option("--url", envvar="MILLSTREAM_URL", help="The broker, for what brings none.")
    ] = None,
    drain: Annotated[
        str,
        typer.Option(envvar="MILLSTREAM_DRAIN", help="How long handlers may finish after SIGTERM, such as 30s."),
    ] = "30s",
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart the workers when a Python file here changes.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Import everything, list handlers and topics, ask the broker, and end.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            envvar="MILLSTREAM_METRICS_PORT",
            min=1,
            max=65535,
            metavar="<port>",
            help="Serve /metrics of all worker processes on this port.",
            show_default=False,
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            "--health-port",
            envvar="MILLSTREAM_HEALTH_PORT",
            min=1,
            max=65535,
            metavar="<port>",
            help="Serve /health and /ready on this port; it may be the same.",
            show_default=False,
        ),
    ] = None,
    http_host: Annotated[
        str,
        typer.Option(
            "--http-host",
            envvar="MILLSTREAM_HTTP_HOST",
            help="The address of these ports; an access token is required off loopback.",
        ),
    ] = "127.0.0.1",
    token_file: TokenFile = None,
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="MILLSTREAM_LOG_FORMAT", help="text, or json: an object per line.")
    ] = "text",
    log_level: Annotated[
        str, typer.Option("--log-level", envvar="MILLSTREAM_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
    tracing: Annotated[
        bool,
        typer.Option(
            "--tracing", envvar="MILLSTREAM_TRACING", help="Export OpenTelemetry traces and metrics, as OTEL_* say."
        ),
    ] = False,
    output: Output = OutputKind.table,
) -> None:
    from millstream.broker.transport.targets import redacted
    from millstream.model import parse_duration_ms
    from millstream.runner import Supervisor, SupervisorSettings
    from millstream.runner.logs import LOG_FORMATS, LOG_LEVELS
    from millstream.runner.worker import REFUSED, log_to_stderr

    if log_level not in LOG_LEVELS:
        raise InvalidArgument("--log-level", log_level, "debug, info, warning or error")
    if log_format not in LOG_FORMATS:
        raise InvalidArgument("--log-format", log_format, "text or json")
    if processes > 1 and url is not None and url.startswith("local:"):
        allowed = "a server's URL (redis://host:port) with --processes: each process would have a broker of its own"
        raise InvalidArgument("--url", redacted(url), allowed)
    if tracing:
        require_tracing()
    if check:
        early_signals.remove()  # the program's own cleanup runs after Ctrl-C
        _check(target, url, output)
        return
    settings = SupervisorSettings(
        target,
        url,
        processes,
        parse_duration_ms(drain, "--drain") / 1000,
        reload,
        log_level,
        Path.cwd(),
        log_format=log_format,
        metrics_port=metrics_port,
        health_port=health_port,
        http_host=http_host,
        http_token=token_in(token_file) if metrics_port or health_port else None,
        tracing=tracing,
    )
    log_to_stderr(log_level, log_format)
    code = asyncio.run(Supervisor(settings).run())
    raise typer.Exit(USAGE if code == REFUSED else FAILED if code else 0)


def require_tracing() -> None:
    """Ends the command if the packages of the extra are missing: before a worker or Spark is started."""
    from importlib.util import find_spec

    names = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    try:
        missing = next((name for name in names if find_spec(name) is None), None)
    except ModuleNotFoundError as error:  # a parent package is missing
        missing = error.name
    if missing is not None:
        show.error(
            f"error: --tracing needs {missing}, which is not installed. Install it: pip install 'millstream[otel]'"
        )
        raise typer.Exit(USAGE)


def _check(target: str, url: str | None, output: OutputKind) -> None:
    from millstream.messaging.failure import traceback_of
    from millstream.observe.format import harmless
    from millstream.runner import load_target

    try:
        rows = asyncio.run(_handlers(load_target(target), url))
    except MillstreamError:
        raise
    except Exception as error:  # the program's own: its text may hold control characters, which a terminal obeys
        typer.echo(harmless(traceback_of(error).rstrip()), err=True)
        raise typer.Exit(FAILED) from None
    columns = [name("handler"), name("topic"), name("group"), name("place", "at")]
    show.rows(output, columns, rows, title=f"{target}: the broker answers")


async def _handlers(target: object, url: str | None) -> list[dict[str, str | None]]:
    from millstream.messaging.housekeeping import kept_streams
    from millstream.runner.worker import RunTarget, handlers_of

    assert isinstance(target, RunTarget)
    async with target.opened(url) as parts:
        kept_streams(handlers_of(parts))  # raises ContradictingPolicies
        for part in parts:
            broker = getattr(part, "broker", None)
            if broker is not None:
                await broker.ping()
        return [
            {"handler": route.name, "topic": route.topic, "group": route.group, "place": route.place}
            for route in handlers_of(parts)
        ]
