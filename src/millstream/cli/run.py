"""``millstream run shop.app:router --processes 4``: workers in processes of their own, kept alive, ended in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli import show
from millstream.cli.main import FAILED, USAGE
from millstream.cli.show import Output, OutputKind, name
from millstream.errors import InvalidArgument


def command(
    target: Annotated[str, typer.Argument(help="What to run, as package.module:name, such as shop.app:router.")],
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, max=1024, help="How many processes.")] = 1,
    url: Annotated[
        str | None, typer.Option("--url", envvar="MILLSTREAM_URL", help="The broker, for what brings none.")
    ] = None,
    drain: Annotated[str, typer.Option(help="How long handlers may finish after SIGTERM, such as 30s.")] = "30s",
    reload: Annotated[bool, typer.Option("--reload", help="Start anew when a Python file here changes.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Import everything, list handlers and topics, ask the broker, and end.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    output: Output = OutputKind.table,
) -> None:
    from millstream.model import parse_duration_ms
    from millstream.runner import REFUSED, Supervisor, SupervisorSettings, log_to_stderr

    if log_level not in ("debug", "info", "warning", "error"):
        raise InvalidArgument("--log-level", log_level, "debug, info, warning or error")
    if check:
        _check(target, url, output)
        return
    settings = SupervisorSettings(
        target, url, processes, parse_duration_ms(drain, "--drain") / 1000, reload, log_level, Path.cwd()
    )
    log_to_stderr(log_level)
    code = asyncio.run(Supervisor(settings).run())
    raise typer.Exit(USAGE if code == REFUSED else FAILED if code else 0)


def _check(target: str, url: str | None, output: OutputKind) -> None:
    from millstream.runner import load_target

    rows = asyncio.run(_handlers(load_target(target), url))
    columns = [name("handler"), name("topic"), name("group"), name("place", "at")]
    show.rows(output, columns, rows, title=f"{target}: the broker answers")


async def _handlers(target: object, url: str | None) -> list[dict[str, str | None]]:
    from millstream.runner import RunTarget, handlers_of

    assert isinstance(target, RunTarget)
    async with target.opened(url) as parts:
        for part in parts:
            broker = getattr(part, "broker", None)
            if broker is not None:
                await broker.ping()
        return [
            {"handler": route.name, "topic": route.topic, "group": route.group, "place": route.place}
            for route in handlers_of(parts)
        ]
