"""Exit codes, so that scripts can tell what went wrong. ``docs/reference/cli.md`` lists them."""

from __future__ import annotations

from typing import Final

from millstream.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    InvalidArgument,
    MillstreamError,
    NoSuchGroup,
    NoSuchStream,
    PermissionDenied,
)
from millstream.observe import harmless

FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DENIED: Final = 4
NOT_FOUND: Final = 5
DECLINED: Final = 6
FINDINGS: Final = 7

LEGEND: Final = {
    0: "done",
    FAILED: "the operation failed; the message says why",
    USAGE: "an argument is missing or not allowed",
    UNREACHABLE: "no server answered at the URL within the deadline",
    DENIED: "the server refused the user or the password",
    NOT_FOUND: "there is no such stream, group, consumer, entry or checkpoint",
    DECLINED: "nothing was changed: the question was answered with no, or --yes was missing",
    FINDINGS: "doctor found something that needs attention",
}

_ALSO_NOT_FOUND: Final = frozenset({"NoSuchConsumer", "NoSuchEntry", "NoSuchDeadLetter", "NoSuchCheckpoint"})
_ALSO_USAGE: Final = frozenset({"TargetRefused"})
"""Errors of rooms that most commands do not load: known by name, so that telling an exit code costs no import."""


def exit_code(error: MillstreamError) -> int:
    if isinstance(error, InvalidArgument) or type(error).__name__ in _ALSO_USAGE:
        return USAGE
    if isinstance(error, BrokerUnavailable):
        return UNREACHABLE
    if isinstance(error, (AuthenticationFailed, PermissionDenied)):
        return DENIED
    if isinstance(error, (NoSuchStream, NoSuchGroup)) or type(error).__name__ in _ALSO_NOT_FOUND:
        return NOT_FOUND
    return FAILED


_TYPE_INSTEAD: Final = (
    (
        "Check that it runs and that the URL is right.",
        "Start one (redis-server, or millstream serve), or name another with --url or MILLSTREAM_URL.",
    ),
    (
        "Create it with create_group(stream, group, start=...).",
        "`millstream groups ls` lists groups; `millstream groups create STREAM GROUP --start 0` makes one.",
    ),
    ("Add an entry or create a group first.", "`millstream streams ls` lists those that exist."),
    ("Use it as it is, or pass exist_ok=True.", "Use it as it is."),
    ("Pass to=<other consumer> to hand them over first.", "Pass --to CONSUMER to hand them over first."),
    ("Put the password into the URL or into MILLSTREAM_URL.", "Put the password into --url or into MILLSTREAM_URL."),
)


def sentence(error: MillstreamError) -> str:
    text = str(error)
    for python, typed in _TYPE_INSTEAD:
        text = text.replace(python, typed)
    return harmless(text)
