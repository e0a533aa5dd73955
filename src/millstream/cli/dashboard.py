"""``millstream dashboard``: streams, dead letters, pipelines and assignments in a browser."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.pipeline_status import token_in
from millstream.cli.show import DEFAULT_URL, Url

PORT = 8090
PIPELINES, ACCESS = "Pipelines", "Access control"
"""Headings of the help. In a single list, long option names would leave little width for the descriptions."""

WithDashboard = Annotated[bool, typer.Option("--dashboard", help="Also start the dashboard, on loopback.")]
DashboardPort = Annotated[
    int,
    typer.Option(
        "--dashboard-port", help="Port of the dashboard; 0 takes a free one.", min=0, max=65535, metavar="<port>"
    ),
]
Pipelines = Annotated[
    list[str] | None,
    typer.Option(
        "--pipelines",
        help="Address of a process that runs pipelines, such as http://127.0.0.1:9000; repeatable.",
        rich_help_panel=PIPELINES,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="A file with the required access token; or set MILLSTREAM_HTTP_TOKEN.",
        show_default=False,
        rich_help_panel=ACCESS,
    ),
]


def command(
    url: Url = DEFAULT_URL,
    pipelines: Pipelines = None,
    pipelines_token_file: Annotated[
        Path | None,
        typer.Option(
            "--pipelines-token-file",
            help="A file with the access token of those processes.",
            show_default=False,
            rich_help_panel=PIPELINES,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other addresses than loopback require a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535, metavar="<port>")
    ] = PORT,
    token_file: TokenFile = None,
    read_only: Annotated[
        bool | None,
        typer.Option(
            "--read-only/--no-read-only", help="Disable actions; the default off loopback.", rich_help_panel=ACCESS
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            help="A further host name of the dashboard, such as a proxy's; repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
) -> None:
    token = token_in(token_file, "--token-file")
    secret = token_in(pipelines_token_file, "--pipelines-token-file") if pipelines_token_file else None
    with run_dashboard(
        url, pipelines or (), secret, host=host, port=port, token=token, read_only=read_only, names=names or ()
    ) as at:
        typer.echo(f"millstream: the dashboard is at {at}")
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()


@contextmanager
def run_dashboard(
    url: str,
    pipelines: list[str] | tuple[str, ...] = (),
    pipelines_token: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token: str | None = None,
    read_only: bool | None = None,
    names: list[str] | tuple[str, ...] = (),
) -> Iterator[str]:
    """Run a dashboard in a thread of its own while the block lasts, and yield its URL."""
    import asyncio

    from millstream.dashboard import Dashboard
    from millstream.observe.http import HttpServer, refuse_open_address

    refuse_open_address(host, port, token, resource="streams", option="--token-file")
    made = Dashboard(
        url,
        pipelines=pipelines,
        pipelines_token=pipelines_token,
        host=host,
        names=names,
        token=token,
        read_only=read_only,
    )
    try:
        with HttpServer(made, host=host, port=port, token=token, on_stop=made.feed.end) as server:
            yield server.url
    finally:
        asyncio.run(made.close())
