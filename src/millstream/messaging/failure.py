"""A handler's failure, as people read it (where in their program it happened, and nothing about how we called it), and
how a dead letter is written.

That is the entry's own fields, and beside them what happened, under names that start with ``dlq.``. Whoever replays it
takes those away again, and has the entry as it was; a replayed entry is marked under names that start with ``replay.``,
which no codec sees. Pure, but for the logging.

``replay.of`` is the id of the entry that it stands for: to whoever remembers entries, it is that one. ``replay.group``
is the one group of this stream that it is meant for; groups that handled it the first time pass it over. In another
stream nobody has handled it, and a mark would keep everybody away.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from dataclasses import dataclass
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
PREFIX = b"dlq."


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


@dataclass(frozen=True, slots=True)
class Burial:
    """Why and where from. ``deliveries`` counts handler starts."""

    stream: str
    original_id: str
    group: str
    consumer: str
    deliveries: int
    error: str
    error_type: str
    traceback: str
    buried_at_ms: int

    def fields(self) -> dict[bytes, bytes]:
        """As it lies beside the entry's own fields."""
        return {PREFIX + name.encode(): _encoded(str(getattr(self, name))) for name in self.__slots__}


def describe(error: BaseException) -> tuple[str, str, str]:
    """Message, type and traceback of an error."""
    return text_of(error), type_of(error), traceback_of(error)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, as JSON can hold it: no bytes stand for that
        return text.encode("utf-8", "backslashreplace")


def bury_with(fields: dict[bytes, bytes], burial: Burial) -> dict[bytes, bytes]:
    """The dead letter's fields. Burying a dead letter again keeps the entry's fields and the latest reason."""
    return {**original(fields), **burial.fields()}


def original(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry's own fields, as its producer wrote them."""
    return {name: value for name, value in fields.items() if not name.startswith(PREFIX)}


def read_burial(fields: dict[bytes, bytes]) -> Burial | None:
    """What a dead letter tells about itself; None where it carries no such fields."""
    told = {
        name[len(PREFIX) :].decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in fields.items()
        if name.startswith(PREFIX)
    }
    if "original_id" not in told:
        return None

    def number(name: str) -> int:
        text = told.get(name, "0")
        return int(text) if text.isdecimal() else 0

    return Burial(
        stream=told.get("stream", ""),
        original_id=told["original_id"],
        group=told.get("group", ""),
        consumer=told.get("consumer", ""),
        deliveries=number("deliveries"),
        error=told.get("error", ""),
        error_type=told.get("error_type", ""),
        traceback=told.get("traceback", ""),
        buried_at_ms=number("buried_at_ms"),
    )


REPLAY_PREFIX = b"replay."
OF = b"replay.of"
GROUP = b"replay.group"


def marked(fields: dict[bytes, bytes], original_id: str | None, group: str | None) -> dict[bytes, bytes]:
    """The entry as it is sent round again. One that was replayed before still stands for the first."""
    first = fields.get(OF) or (original_id or "").encode()
    marks = {OF: first} if first else {}
    if group is not None:
        marks[GROUP] = group.encode("utf-8", "surrogateescape")
    return {**unmarked(fields), **marks}


def unmarked(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry as its producer wrote it."""
    if OF not in fields and GROUP not in fields:
        return fields  # as nearly all of them
    return {name: value for name, value in fields.items() if not name.startswith(REPLAY_PREFIX)}


def is_for(fields: dict[bytes, bytes], group: bytes | None) -> bool:
    """Whether a replayed entry concerns this group, or a subscriber without one."""
    return fields.get(GROUP, group) == group
