"""An embedded broker for others: ``millstream serve`` lets other processes reach it, with any Redis client;
``millstream migrate`` moves its streams, groups and pending lists to Redis, and checks them.
"""

from __future__ import annotations

import logging
import os
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
from millstream.cli.dashboard import PORT, Beside, BesidePort, shown
from millstream.cli.show import Output, OutputKind
from millstream.errors import InvalidArgument, MillstreamError
from millstream.model import parse_size_bytes
from millstream.observe import count_of


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
    dashboard: Beside = False,
    dashboard_port: BesidePort = PORT,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings.")] = False,
) -> None:
    """Serve an embedded broker to redis-cli and any Redis client."""
    from millstream.broker import Embedded
    from millstream.server import Server, ServerLimits, make_room_for

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    secret = _password(password, password_file)
    embedded = Embedded(
        directory=directory,
        appendfsync=appendfsync,  # type: ignore[arg-type]  # checked there, with an error that says what it may be
        password=secret,
        debug_enabled=enable_debug_command,
    )
    try:
        embedded.set_maxmemory(parse_size_bytes(maxmemory, "--maxmemory"))
        limits = ServerLimits(clients=make_room_for(maxclients))
        server = Server(embedded, host, port, unix_socket=unixsocket, limits=limits)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.request_stop())
        if not quiet:
            _say(_greeting(server.host, server.port, embedded, secret is not None))
        with ExitStack() as beside:
            if dashboard:
                at = beside.enter_context(shown(_own_url(server.host, server.port, secret), port=dashboard_port))
                _say(f"millstream: the dashboard is at {at}")
            server.run()
    finally:
        embedded.close()
    if not quiet:
        _say(
            f"millstream: stopped, {'nothing is kept without --dir' if directory is None else 'everything is written'}"
        )


def _own_url(host: str, port: int, secret: bytes | None) -> str:
    """Where the dashboard finds the server that it belongs to."""
    near = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104  # compared, not bound
    login = f":{quote(secret, safe='')}@" if secret is not None else ""
    return f"redis://{login}[{near}]:{port}" if ":" in near else f"redis://{login}{near}:{port}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _greeting(host: str, port: int, embedded: object, guarded: bool) -> str:
    from millstream.broker import Embedded

    assert isinstance(embedded, Embedded)
    keys = sum(len(database.values) for database in embedded.engine.databases)
    if embedded.persistence is None:
        data = "data in memory only (give --dir to keep it)"
    else:
        persistence = embedded.persistence
        data = f"data in {persistence.directory}, {keys} keys loaded in {persistence.load_seconds:.2f} s"
    shown = f"[{host}]" if ":" in host else host
    return f"millstream: ready on redis://{shown}:{port}{' (password required)' if guarded else ''}, {data}"


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
        raise InvalidArgument("--password", password, "a password that is not empty")
    return os.fsencode(password)


def migrate(
    source: Annotated[str, typer.Option("--from", help="The embedded broker: local:///path. It must not be open.")],
    target: Annotated[str, typer.Option("--to", help="The Redis: redis://host:port and its kin.")],
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="Pass over keys that are there already and the same.")
    ] = False,
    output: Output = OutputKind.table,
) -> None:
    """Move an embedded broker's data to Redis.

    Keys that exist in the target are refused before anything is written. Afterwards lengths, counters, groups, pending
    lists and every entry are compared.
    """
    from millstream.broker import migrate

    began = time.monotonic()
    try:
        with _Bar(shown=output is OutputKind.table and sys.stderr.isatty()) as bar:
            report = migrate(source, target, skip_existing=skip_existing, progress=bar.tell)
    except KeyboardInterrupt:
        show.error("interrupted: the keys that were moved are whole. Repeat with --skip-existing to go on.")
        raise typer.Exit(130) from None
    seconds = time.monotonic() - began
    moved = (
        f"{count_of(report.streams, 'stream', 'streams')} with {count_of(report.entries, 'entry', 'entries')}",
        count_of(report.groups, "group", "groups"),
        count_of(report.consumers, "consumer", "consumers"),
        count_of(report.pending, "pending entry", "pending entries"),
        count_of(report.other_keys, "other key", "other keys"),
    )
    skipped = f"; {count_of(report.skipped, 'key was', 'keys were')} there already" if report.skipped else ""
    show.outcome(
        output,
        f"moved {', '.join(moved)}{skipped}; compared with the target, all the same ({seconds:.1f} s)",
        **asdict(report),
        seconds=round(seconds, 3),
    )


class _Bar:
    """Progress for people who watch; silence for pipes."""

    def __init__(self, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("moving"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[key]}", markup=False),
            console=Console(stderr=True), disable=not shown, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("moving", key="")

    def tell(self, name: str, done: int, total: int) -> None:
        shown = name.encode("ascii", "backslashreplace").decode()[:60]
        self._progress.update(self._task, completed=done, total=total, key=shown)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
