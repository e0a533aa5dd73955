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
PIPELINES, RIGHTS = "Pipelines", "Who may do what"
"""Headings of the help: in one list, long names would leave no room for what they mean."""

Beside = Annotated[bool, typer.Option("--dashboard", help="Bring the dashboard along, on loopback.")]
BesidePort = Annotated[
    int, typer.Option("--dashboard-port", help="Its port; 0 takes a free one.", min=0, max=65535, metavar="<port>")
]
Pipelines = Annotated[
    list[str] | None,
    typer.Option(
        "--pipelines",
        help="Where pipelines run, such as http://127.0.0.1:9000; may be given several times.",
        rich_help_panel=PIPELINES,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="A file with the token that everybody must bring; or set MILLSTREAM_HTTP_TOKEN.",
        show_default=False,
        rich_help_panel=RIGHTS,
    ),
]


def command(
    url: Url = DEFAULT_URL,
    pipelines: Pipelines = None,
    pipelines_token_file: Annotated[
        Path | None,
        typer.Option(
            "--pipelines-token-file",
            help="A file with the token of those pipelines.",
            show_default=False,
            rich_help_panel=PIPELINES,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Off loopback a token is a must.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535, metavar="<port>")
    ] = PORT,
    token_file: TokenFile = None,
    read_only: Annotated[
        bool | None,
        typer.Option(
            "--read-only/--no-read-only", help="Show, and do nothing; the default off loopback.", rich_help_panel=RIGHTS
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Another name under which browsers ask for it, such as a proxy's.", rich_help_panel=RIGHTS
        ),
    ] = None,
) -> None:
    token = token_in(token_file, "--token-file")
    secret = token_in(pipelines_token_file, "--pipelines-token-file") if pipelines_token_file else None
    with shown(
        url, pipelines or (), secret, host=host, port=port, token=token, read_only=read_only, names=names or ()
    ) as at:
        typer.echo(f"millstream: the dashboard is at {at}")
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()


@contextmanager
def shown(
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
    """A dashboard on a port, on a thread of its own, while the block lasts; its address."""
    import asyncio

    from millstream.dashboard import Dashboard
    from millstream.observe import HttpServer, refuse_strangers

    refuse_strangers(host, port, token, what="streams", option="--token-file")
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
