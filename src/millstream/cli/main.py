"""The command ``millstream``: imports only the chosen command's module, and turns errors into exit codes, so that
scripts can distinguish them. ``docs/reference/cli.md`` lists them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final, NamedTuple

import typer

from millstream import __version__
from millstream.cli import early_signals
from millstream.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    InvalidArgument,
    MillstreamError,
    NoSuchGroup,
    NoSuchStream,
    PermissionDenied,
)
from millstream.observe.format import harmless

FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DENIED: Final = 4
NOT_FOUND: Final = 5
DECLINED: Final = 6
FINDINGS: Final = 7
TAKEN: Final = 8

LEGEND: Final = {
    0: "done",
    FAILED: "the operation failed, and the message says why",
    USAGE: "an argument is missing or not allowed",
    UNREACHABLE: "no server answered at the URL within the deadline",
    DENIED: "the server refused the user or the password",
    NOT_FOUND: "there is no such stream, group, consumer, entry or checkpoint",
    DECLINED: "nothing was changed: the question was answered with no, or --yes was missing",
    FINDINGS: "doctor found something that needs attention",
    TAKEN: "another process runs this pipeline, or took it over from this one",
}

_ALSO_NOT_FOUND: Final = frozenset({"NoSuchConsumer", "NoSuchEntry", "NoSuchDeadLetter", "NoSuchCheckpoint"})
_ALSO_USAGE: Final = frozenset({"TargetRefused"})
_ALSO_UNREACHABLE: Final = frozenset({"TargetLost"})
_ALSO_DENIED: Final = frozenset({"AccessRefused"})
_TAKEN: Final = frozenset({"CheckpointLocked", "LeaseLost"})
"""Errors of packages that most commands do not import, by name, so that their exit codes need no import."""


class Chapter(NamedTuple):
    """``module:name`` of a group of commands (a Typer), or of a function that is one command."""

    at: str
    help: str
    is_group: bool = True


CHAPTERS = {
    "init": Chapter("init:command", "Create a service with a handler, a test, a Dockerfile and a Makefile.", False),
    "streams": Chapter("streams:app", "Look at streams, add to them, trim and remove them."),
    "groups": Chapter("groups:app", "Look at consumer groups, make, move and remove them."),
    "consumers": Chapter("groups:consumers", "Look at consumers, and remove dead ones without losing their work."),
    "pending": Chapter("groups:pending", "List pending entries; claim or acknowledge them."),
    "dlq": Chapter("dlq:app", "Work on dead letters: list, group by error, replay, purge."),
    "retention": Chapter("retention:app", "Keep streams short without dropping what a group still needs."),
    "assignments": Chapter("assignments:app", "See who owns which stream; announce and release streams."),
    "pipeline": Chapter("pipeline:app", "Validate, plan and run pipelines on Spark."),
    "run": Chapter(
        "run:command", "Run a router, a bus or assigned subscribers, in as many processes as you like.", False
    ),
    "observe": Chapter("observe:app", "Write alert rules and a dashboard for Prometheus and Grafana."),
    "serve": Chapter("serve:command", "Serve an embedded broker to other processes, over Redis's protocol.", False),
    "migrate": Chapter("serve:migrate", "Move an embedded broker's data to Redis.", False),
    "top": Chapter("top:command", "Watch streams, rates, lag, pending entries and memory, live.", False),
    "dashboard": Chapter(
        "dashboard:command", "Look at streams, dead letters and pipelines in a browser, and act there.", False
    ),
    "doctor": Chapter("doctor:command", "Check a server, or one stream, and say what to do.", False),
    "verify": Chapter(
        "doctor:verify", "Ask a server all that the contract promises, and tell what does not hold.", False
    ),
    "demo": Chapter("demo:command", "See the whole product at work in under two minutes.", False),
}


def build(words: list[str]) -> typer.Typer:
    """The command line with the command group in ``words`` loaded, and the others as one line of help."""
    app = typer.Typer(
        name="millstream",
        help="Reliable event streams on Redis, from an embedded broker in one process to a Spark cluster.",
        epilog="The broker is named by --url or MILLSTREAM_URL. Exit codes: "
        + "; ".join(f"{code} {meaning}" for code, meaning in LEGEND.items())
        + ".",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback()
    def millstream(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", is_eager=True, callback=print_version
        ),
    ) -> None:
        pass

    completing = any(name.endswith("_COMPLETE") for name in os.environ)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, chapter in CHAPTERS.items():
        if completing or name == chosen:
            module, _, attribute = chapter.at.partition(":")
            part = getattr(importlib.import_module(f"millstream.cli.{module}"), attribute)
            if chapter.is_group:
                app.add_typer(part, name=name, help=chapter.help, no_args_is_help=True)
            else:
                app.command(name, help=chapter.help)(part)
        else:
            app.command(name, help=chapter.help)(_not_loaded)
    return app


SHARED = ("--url", "--output", "-o")
"""Options with a value that nearly every command accepts, and that users may type before the command."""


def shared_options_last(words: list[str]) -> list[str]:
    """The same arguments with the shared options after the command: ``--url X streams ls`` is ``streams ls --url X``.

    An option after the command overrides it. A command that does not accept the option reports that itself.
    """
    path: list[str] = []
    moved: list[str] = []
    remaining = list(words)
    while remaining and not (path and (len(path) == 2 or path[0] not in CHAPTERS or not CHAPTERS[path[0]].is_group)):
        if remaining[0] in SHARED and len(remaining) > 1:
            moved += [remaining.pop(0), remaining.pop(0)]
        elif remaining[0].startswith(tuple(f"{option}=" for option in SHARED)):
            moved.append(remaining.pop(0))
        elif remaining[0].startswith("-"):
            return [*path, *remaining]  # such as --help, which is not about a command with shared options
        else:
            path.append(remaining.pop(0))
    return [*path, *moved, *remaining]


def _not_loaded() -> None:
    """A placeholder in the list of commands for a command group that was not chosen."""


def _replace_closed_streams() -> None:
    """Opens /dev/null for a standard stream that was closed before the start, for which Python has None.

    Otherwise the next socket or file that is opened would get the number of the standard stream.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115


def main() -> None:
    _replace_closed_streams()
    words = shared_options_last(sys.argv[1:])
    try:
        command_line = build(words)
        if not _handles_signals(words):
            early_signals.remove()
        command_line(words)
    except MillstreamError as error:
        from millstream.cli import show

        show.error(f"error: {sentence(error, takes_url='pipeline' not in words[:1])}")
        sys.exit(exit_code(error))
    except OSError as error:  # a full disk, an unreadable file: the system's error text, without a traceback
        from millstream.cli import show

        show.error(f"error: {harmless(str(error))}")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)


def _handles_signals(words: list[str]) -> bool:
    """Whether the command installs signal handlers before it starts work that an immediate exit would leave
    incomplete."""
    return words[:1] in (["run"], ["serve"], ["dashboard"]) or words[:2] == ["pipeline", "run"]


def exit_code(error: MillstreamError) -> int:
    if isinstance(error, InvalidArgument) or type(error).__name__ in _ALSO_USAGE:
        return USAGE
    if isinstance(error, BrokerUnavailable) or type(error).__name__ in _ALSO_UNREACHABLE:
        return UNREACHABLE
    if isinstance(error, (AuthenticationFailed, PermissionDenied)) or type(error).__name__ in _ALSO_DENIED:
        return DENIED
    if isinstance(error, (NoSuchStream, NoSuchGroup)) or type(error).__name__ in _ALSO_NOT_FOUND:
        return NOT_FOUND
    return TAKEN if type(error).__name__ in _TAKEN else FAILED


_ON_THE_COMMAND_LINE: Final = (
    (
        "Check that it runs and that the URL is right.",
        "Start one (redis-server, or millstream serve), or name another with --url or MILLSTREAM_URL.",
    ),
    ("Put the password into the URL.", "Put the password into --url or into MILLSTREAM_URL."),
)
_IN_THE_FILE: Final = (
    ("Check that it runs and that the URL is right.", "Check that it runs and that the pipeline's file names it."),
    ("Put the password into the URL.", "Put the password into the uri, or into the file that password_file names."),
)
_TYPE_INSTEAD: Final = (
    (
        "Create it with create_group(stream, group, start=...).",
        "`millstream groups ls` lists groups; `millstream groups create STREAM GROUP --start 0` makes one.",
    ),
    ("Add an entry or create a group first.", "`millstream streams ls` lists those that exist."),
    ("Use it as it is, or pass exist_ok=True.", "Use it as it is."),
    (
        "Pass to=<other consumer> to move them to that consumer, or discard=True to drop them.",
        "Pass --to CONSUMER to move them to that consumer first.",
    ),
)


def sentence(error: MillstreamError, *, takes_url: bool = True) -> str:
    """The error text for the command line. A command without ``--url`` has its addresses in a file."""
    text = str(error)
    for python, typed in (*_TYPE_INSTEAD, *(_ON_THE_COMMAND_LINE if takes_url else _IN_THE_FILE)):
        text = text.replace(python, typed)
    return harmless(text)
