"""How the failure of a handler is logged, and the fields of a dead letter.

A logged traceback shows the user's code and leaves out the frames of this package. A dead letter contains the fields of
the entry, and the reason in fields whose names start with ``dlq.``. A replay removes those, which restores the entry,
and marks it in fields that start with ``replay.``, which codecs do not see. Pure, except for logging.

``replay.of`` is the id of the original entry, for deduplication. ``replay.group`` is the one group of this stream that
the replayed entry is for; other groups have handled it and skip it. An entry that is replayed to another stream is not
marked with a group, because no group has handled it there.
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
_HIDDEN_PACKAGES = ("messaging", "cqrs", "broker", "assignment", "wire", "engine", "runner")
_HIDDEN_PATHS = tuple(f"{_OURS}/{package}/" for package in _HIDDEN_PACKAGES)
"""Frames of this package that a logged traceback leaves out."""
_BETWEEN = ("/asyncio/", "/concurrent/futures/", "/contextlib.py", "/importlib/", "<frozen importlib")
"""Frames of the standard library between the code of this package and the user's: running a sync handler in a thread,
importing a module."""
_TRACEBACK_LIMIT = 8_000
_TEXT_LIMIT = 4_000
PREFIX = b"dlq."


def text_of(error: BaseException) -> str:
    """The text of an error, shortened. Its ``__str__`` may fail."""
    try:
        text = str(error) or repr(error)
    except Exception:  # the message needs an outcome even if __str__ is defective
        text = f"{type(error).__name__}, which cannot be shown as text"
    return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT] + "..."


def type_of(error: BaseException) -> str:
    """The class of an error, with its module unless it is a builtin."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def traceback_of(error: BaseException) -> str:
    """The traceback without frames of this package, also in the causes; empty if the error was never raised. Of a long
    one the end is kept, because it names the cause."""
    if error.__traceback__ is None:
        return ""
    whole = traceback.TracebackException.from_exception(error)
    _leave_out_ours(whole, 0)
    return "".join(whole.format())[-_TRACEBACK_LIMIT:]


def place_of(error: BaseException) -> str:
    """The line of the user's code that raised it, such as ``shop/app.py:12``; empty if it was never raised."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    installed = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), _OURS)
    theirs = [frame for frame in frames if not frame.filename.startswith(installed)] or frames[-1:]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _leave_out_ours(error: traceback.TracebackException, depth: int) -> None:
    first = next((at for at, frame in enumerate(error.stack) if not _is_between(frame)), len(error.stack))
    frames = [frame for frame in error.stack[first:] if not frame.filename.startswith(_HIDDEN_PATHS)]
    error.stack = traceback.StackSummary.from_list(frames)
    if depth < 20:
        for inner in (error.__cause__, error.__context__, *(error.exceptions or ())):
            if inner is not None:
                _leave_out_ours(inner, depth + 1)


def _is_between(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_HIDDEN_PATHS) or any(part in frame.filename for part in _BETWEEN)


def report_failure(
    message: Message, handler: str, error: BaseException, *, of: int | None = None, level: int = logging.WARNING
) -> None:
    """Logs the handler, the message, the delivery and the error in one record. A retry or rejection that the handler
    asked for is logged at INFO. ``of``: the largest number of deliveries."""
    if isinstance(error, (RetryLater, Rejected)):
        level = logging.INFO
    if not log.isEnabledFor(level):
        return
    group = f", group {message.group!r}" if message.group is not None else ""
    limit = f" of {of}" if of is not None else ""
    trace = traceback_of(error)
    log.log(
        level,
        "handler %s failed on %s of topic %r%s, delivery %d%s: %s: %s%s",
        *(handler, message.id, message.topic, group, message.times_delivered, limit),
        *(type_of(error), text_of(error), f"\n{trace.rstrip()}" if trace else ""),
        extra={"millstream_message": message},
    )


@dataclass(frozen=True, slots=True)
class DeadLetterDetails:
    """Why an entry was dead-lettered, and where it came from. ``deliveries`` is its delivery count."""

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
        """The fields that a dead letter has in addition to those of the entry."""
        return {PREFIX + name.encode(): _encoded(str(getattr(self, name))) for name in self.__slots__}


def describe(error: BaseException) -> tuple[str, str, str]:
    """Message, type and traceback of an error."""
    return text_of(error), type_of(error), traceback_of(error)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can contain and UTF-8 cannot
        return text.encode("utf-8", "backslashreplace")


def dead_letter_fields(fields: dict[bytes, bytes], details: DeadLetterDetails) -> dict[bytes, bytes]:
    """The fields of a dead letter. If a dead letter is dead-lettered, the latest reason is kept."""
    return {**original(fields), **details.fields()}


def original(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry's own fields, as its producer wrote them."""
    return {name: value for name, value in fields.items() if not name.startswith(PREFIX)}


def read_details(fields: dict[bytes, bytes]) -> DeadLetterDetails | None:
    """The reason of a dead letter; None if it has no such fields."""
    values = {
        name[len(PREFIX) :].decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in fields.items()
        if name.startswith(PREFIX)
    }
    if "original_id" not in values:
        return None

    def number(name: str) -> int:
        text = values.get(name, "0")
        return int(text) if text.isdecimal() else 0

    return DeadLetterDetails(
        stream=values.get("stream", ""),
        original_id=values["original_id"],
        group=values.get("group", ""),
        consumer=values.get("consumer", ""),
        deliveries=number("deliveries"),
        error=values.get("error", ""),
        error_type=values.get("error_type", ""),
        traceback=values.get("traceback", ""),
        buried_at_ms=number("buried_at_ms"),
    )


REPLAY_PREFIX = b"replay."
OF = b"replay.of"
GROUP = b"replay.group"


def marked(fields: dict[bytes, bytes], original_id: str | None, group: str | None) -> dict[bytes, bytes]:
    """The entry as it is replayed. If it was replayed before, it still names the first entry."""
    first = fields.get(OF) or (original_id or "").encode()
    marks = {OF: first} if first else {}
    if group is not None:
        marks[GROUP] = group.encode("utf-8", "surrogateescape")
    return {**unmarked(fields), **marks}


def unmarked(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry as its producer wrote it."""
    if OF not in fields and GROUP not in fields:
        return fields  # nearly always
    return {name: value for name, value in fields.items() if not name.startswith(REPLAY_PREFIX)}


def is_for(fields: dict[bytes, bytes], group: bytes | None) -> bool:
    """Whether a replayed entry concerns this group, or a subscriber without one."""
    return fields.get(GROUP, group) == group
