"""A handler's failure, as people read it: where in their program it happened, and nothing about how we called it."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from pathlib import Path

from millstream.messaging.errors import Rejected, RetryLater
from millstream.messaging.message import Message

log = logging.getLogger("millstream.handlers")

_OURS = str(Path(__file__).parents[1])
_ROOMS = tuple(f"{_OURS}/{room}/" for room in ("messaging", "cqrs", "broker", "assignment", "wire", "engine", "runner"))
_BETWEEN = ("/asyncio/", "/concurrent/futures/", "/contextlib.py", "/importlib/", "<frozen importlib")
"""The standard library's, where they stand between our code and people's: how a sync handler gets into a thread, how a
module is found."""
_TRACEBACK_LIMIT = 8_000
_TEXT_LIMIT = 4_000


def text_of(error: BaseException) -> str:
    """What an error says, whatever its class makes of that: it may fail to say it, or take megabytes."""
    try:
        text = str(error) or repr(error)
    except Exception:  # a stranger's __str__: its message must get its outcome all the same
        text = f"{type(error).__name__}, which cannot be shown as text"
    return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT] + "..."


def type_of(error: BaseException) -> str:
    """Its class, with its module where that is not Python itself."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def traceback_of(error: BaseException) -> str:
    """The traceback without our frames, in what caused it too; empty where the error was never raised. The end of a
    long one is the part that tells most."""
    if error.__traceback__ is None:
        return ""
    whole = traceback.TracebackException.from_exception(error)
    _leave_out_ours(whole, 0)
    return "".join(whole.format())[-_TRACEBACK_LIMIT:]


def place_of(error: BaseException) -> str:
    """The line of people's own that raised it, such as ``shop/app.py:12``; empty where it was never raised."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    installed = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), _OURS)
    theirs = [frame for frame in frames if not frame.filename.startswith(installed)] or frames[-1:]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _leave_out_ours(shown: traceback.TracebackException, depth: int) -> None:
    first = next((at for at, frame in enumerate(shown.stack) if not _is_between(frame)), len(shown.stack))
    kept = [frame for frame in shown.stack[first:] if not frame.filename.startswith(_ROOMS)]
    shown.stack = traceback.StackSummary.from_list(kept)
    if depth < 20:
        for inner in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
            if inner is not None:
                _leave_out_ours(inner, depth + 1)


def _is_between(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_ROOMS) or any(part in frame.filename for part in _BETWEEN)


def report_failure(
    message: Message, handler: str, error: BaseException, *, of: int | None = None, level: int = logging.WARNING
) -> None:
    """One record that names everything somebody needs to find it. What a handler asked for is no failure: it is told
    more quietly. ``of``: the last delivery that there may be."""
    if isinstance(error, (RetryLater, Rejected)):
        level = logging.INFO
    if not log.isEnabledFor(level):
        return
    group = f", group {message.group!r}" if message.group is not None else ""
    most = f" of {of}" if of is not None else ""
    trace = traceback_of(error)
    log.log(
        level,
        "handler %s failed on %s of topic %r%s, delivery %d%s: %s: %s%s",
        *(handler, message.id, message.topic, group, message.times_delivered, most),
        *(type_of(error), text_of(error), f"\n{trace.rstrip()}" if trace else ""),
    )
