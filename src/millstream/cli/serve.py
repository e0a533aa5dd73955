"""``millstream serve``: serve an embedded broker to other processes, over the Redis protocol.

``millstream migrate``: move the data of an embedded broker to Redis, and compare the result.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from millstream.cli import show
from millstream.cli.dashboard import PORT, DashboardPort, WithDashboard, run_dashboard
from millstream.cli.pipeline_status import token_in
from millstream.cli.show import Output, OutputKind
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import parse_size_bytes
from millstream.observe.format import count_of
from millstream.observe.stderr_handler import StderrHandler


def command(
    host: Annotated[str, typer.Option(help="Address to listen on. Off loopback a password is required.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535, metavar="<port>")
    ] = 6380,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep a journal in this directory. Without it, data lives in memory.")
    ] = None,
    password: Annotated[
        str | None,
        typer.Option(help="Clients must AUTH with it. Safer: --password-file.", envvar="MILLSTREAM_PASSWORD"),
    ] = None,
    password_file: Annotated[Path | None, typer.Option(help="A file whose first line is the password.")] = None,
    appendfsync: Annotated[str, typer.Option(help="When the journal is synced: always, everysec or no.")] = "everysec",
    maxmemory: Annotated[str, typer.Option(help="Refuse writes beyond this: 512mb, 2gb; 0 is no limit.")] = "0",
    maxclients: Annotated[int, typer.Option(help="Connections at the same time.", min=1)] = 10_000,
    unixsocket: Annotated[Path | None, typer.Option(help="Listen on this Unix socket as well.")] = None,
    enable_debug_command: Annotated[
        bool, typer.Option("--enable-debug-command", help="Allow the DEBUG command.")
    ] = False,
    dashboard: WithDashboard = False,
    dashboard_port: DashboardPort = PORT,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings.")] = False,
) -> None:
    """Serve an embedded broker to redis-cli and any Redis client."""
    from millstream.broker import Embedded
    from millstream.server import Server, ServerLimits
    from millstream.server.connections import raise_file_limit

    logging.basicConfig(handlers=[StderrHandler()], format="%(levelname)s: %(message)s", level=logging.WARNING)
    secret = _password(password, password_file)
    embedded = Embedded(
        directory=directory,
        appendfsync=appendfsync,  # type: ignore[arg-type]  # checked there
        password=secret,
        debug_enabled=enable_debug_command,
    )
    try:
        embedded.set_maxmemory(parse_size_bytes(maxmemory, "--maxmemory"))
        limits = ServerLimits(clients=raise_file_limit(maxclients))
        server = Server(embedded, host, port, unix_socket=unixsocket, limits=limits)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.request_stop())
        if not quiet:
            _print_line(_ready_line(server.host, server.port, embedded, secret is not None))
        with ExitStack() as stack:
            if dashboard:
                configured = token_in(None)
                # The dashboard has the password of the broker. Without a token, every user of this machine could read
                # data through the dashboard without knowing that password.
                token = configured or (secrets.token_urlsafe(24) if secret is not None else None)
                own_url = _own_url(server.host, server.port, secret)
                at = stack.enter_context(run_dashboard(own_url, port=dashboard_port, token=token))
                hint = f" (log in with the token {token})" if token is not None and configured is None else ""
                _print_line(f"millstream: the dashboard is at {at}{hint}")
            server.run()
    finally:
        embedded.close()
    if not quiet:
        _print_line(
            f"millstream: stopped, {'data was discarded (no --dir)' if directory is None else 'all data is on disk'}"
        )


def _own_url(host: str, port: int, secret: bytes | None) -> str:
    """The URL under which the dashboard in this process reaches the server."""
    reachable = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104  # compared, not bound
    login = f":{quote(secret, safe='')}@" if secret is not None else ""
    return f"redis://{login}[{reachable}]:{port}" if ":" in reachable else f"redis://{login}{reachable}:{port}"


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _ready_line(host: str, port: int, embedded: object, has_password: bool) -> str:
    from millstream.broker import Embedded

    assert isinstance(embedded, Embedded)
    keys = sum(len(database.values) for database in embedded.engine.databases)
    if embedded.persistence is None:
        data = "data in memory only (give --dir to keep it)"
    else:
        persistence = embedded.persistence
        data = f"data in {persistence.directory}, {keys} keys loaded in {persistence.load_seconds:.2f} s"
    address = f"[{host}]" if ":" in host else host
    return f"millstream: ready on redis://{address}:{port}{' (password required)' if has_password else ''}, {data}"


def _password(password: str | None, password_file: Path | None) -> bytes | None:
    if password_file is not None:
        try:
            lines = password_file.read_bytes().splitlines()
        except OSError as error:
            raise MillstreamError(f"--password-file {password_file} cannot be read: {error.strerror}.") from error
        if not lines or not lines[0]:
            raise InvalidArgument("--password-file", str(password_file), "a file whose first line is the password")
        return lines[0]
    if password is None:
        return None
    if not password:
        raise InvalidArgument("--password", password, "a non-empty password")
    return os.fsencode(password)


def migrate(
    source: Annotated[
        str, typer.Option("--from", help="The embedded broker: local:///path. No process may have it open.")
    ],
    target: Annotated[str, typer.Option("--to", help="The target Redis, such as redis://host:port.")],
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="Skip keys that already exist with the same content.")
    ] = False,
    output: Output = OutputKind.table,
) -> None:
    """Move an embedded broker's data to Redis.

    Existing keys in the target are an error, before anything is written. Afterwards, lengths, counters, groups, pending
    lists and every entry are compared.
    """
    from millstream.broker import migrate

    began = time.monotonic()
    try:
        with _ProgressBar(enabled=output is OutputKind.table and sys.stderr.isatty()) as bar:
            report = migrate(source, target, skip_existing=skip_existing, progress=bar.update)
    except KeyboardInterrupt:
        show.error("interrupted: the moved keys are complete. Repeat with --skip-existing to continue.")
        raise typer.Exit(130) from None
    seconds = time.monotonic() - began
    moved = (
        f"{count_of(report.streams, 'stream', 'streams')} with {count_of(report.entries, 'entry', 'entries')}",
        count_of(report.groups, "group", "groups"),
        count_of(report.consumers, "consumer", "consumers"),
        count_of(report.pending, "pending entry", "pending entries"),
        count_of(report.other_keys, "other key", "other keys"),
    )
    skipped = f"; {count_of(report.skipped, 'key', 'keys')} skipped" if report.skipped else ""
    show.outcome(
        output,
        f"moved {', '.join(moved)}{skipped}; compared with the target: no differences ({seconds:.1f} s)",
        **asdict(report),
        seconds=round(seconds, 3),
    )


class _ProgressBar:
    """A progress bar on a terminal; without one, nothing is printed."""

    def __init__(self, *, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("moving"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[key]}", markup=False),
            console=Console(stderr=True),
            disable=not enabled,
            transient=True,
        )
        self._task = self._progress.add_task("moving", key="")

    def update(self, name: str, done: int, total: int) -> None:
        key = name.encode("ascii", "backslashreplace").decode()[:60]
        self._progress.update(self._task, completed=done, total=total, key=key)

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
