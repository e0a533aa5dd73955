"""Log lines of ``millstream run``: text for people, or one JSON object per line for a log collector.

A JSON line names the message that the handler was processing: a middleware sets the current message in a context
variable, which threads of synchronous handlers inherit. With tracing, it also names the current span.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from millstream.messaging import Message, Middleware, tracing
from millstream.observe.format import printable
from millstream.observe.stderr_handler import StderrHandler

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
MAX_TEXT_CHARS: Final = 32_768
"""Characters of a message or a traceback in a JSON line; a longer one is cut in the middle."""
MAX_EXTRA_FIELDS: Final = 50
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_FAKE_LINE: Final = re.compile(r"\n(?=\d{4}-\d\d-\d\d )")
_RECORD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "millstream_message",
    "color_message",
}
_OUR_FIELDS: Final = frozenset(
    {
        "time",
        "level",
        "logger",
        "message",
        "process",
        "stream",
        "group",
        "entry_id",
        "delivery_count",
        "trace_id",
        "span_id",
        "exception",
    }
)

_current_message: ContextVar[Message | None] = ContextVar("millstream_log_message", default=None)


def log_context() -> Middleware:
    """Middleware that adds stream, group, entry id, delivery count and trace id to JSON lines of a handler."""

    def middleware(handler: Any) -> Any:
        async def handle(message: Message) -> Any:
            token = _current_message.set(message)
            try:
                return await handler(message)
            finally:
                _current_message.reset(token)

        return handle

    return middleware


def trace_id_of(metadata: Mapping[str, str]) -> str | None:
    """The trace id of a W3C ``traceparent``; None if it is missing or malformed."""
    match = _TRACEPARENT.fullmatch(str(metadata.get("traceparent", "")))
    return match[1] if match else None


class JsonFormatter(logging.Formatter):
    """One JSON object per record, always on one line: control characters and non-ASCII characters are escaped.

    Fields passed as ``extra=`` are added. They replace the fields of the message (``stream``, ``group``, ``entry_id``,
    ``delivery_count``, ``trace_id``, ``span_id``), and no other field.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "logger": _text(record.name),
            "message": _text(_message_of(record)),
            "process": record.process,
        }
        message = getattr(record, "millstream_message", None) or _current_message.get()
        fields |= _of_message(message) | _of_span(message)
        fields |= _extra(record)
        if record.exc_info:
            fields["exception"] = _text(self.formatException(record.exc_info))
        elif record.exc_text:
            fields["exception"] = _text(record.exc_text)
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """Lines of text. Control characters are escaped: an error's text may come from a message, and a terminal would
    interpret it. In a text of several lines, a line that begins like a log line is indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not text.replace("\n", "").isprintable():
            text = "".join(char if char in "\n\t\\" else printable(char) for char in text)
        return _FAKE_LINE.sub("\n  ", text)


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # wrong arguments, or an argument whose __str__ raises: the line must not be lost
        return f"{_repr(record.msg)} with arguments that cannot be formatted"


def _of_message(message: Message | None) -> dict[str, Any]:
    if message is None or message.id is None:
        return {}
    fields: dict[str, Any] = {"stream": _text(message.topic), "entry_id": str(message.id)}
    fields["delivery_count"] = message.times_delivered
    if message.group is not None:
        fields["group"] = _text(message.group)
    if (trace_id := trace_id_of(message.metadata)) is not None:
        fields["trace_id"] = trace_id
    return fields


def _of_span(message: Message | None) -> dict[str, Any]:
    """The ids of the current span. A line about a message that is logged outside of its spans has its trace id only."""
    ids = tracing.active.current_ids() if tracing.active is not None else None
    if ids is None or (message is not None and trace_id_of(message.metadata) not in (None, ids[0])):
        return {}
    return {"trace_id": ids[0], "span_id": ids[1]}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in _extra_items(record):
        if len(fields) >= MAX_EXTRA_FIELDS:
            break
        if value is None or (isinstance(value, int) and _has_decimal_form(value)):
            fields[_text(name)] = value
        elif isinstance(value, float):
            fields[_text(name)] = value if abs(value) < float("inf") else str(value)  # NaN and infinity are no JSON
        else:
            fields[_text(name)] = _text(value)
    return fields


def _extra_items(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    of_message = {"stream", "group", "entry_id", "delivery_count", "trace_id", "span_id"}
    for name, value in vars(record).items():
        if name not in _RECORD_ATTRIBUTES and (name in of_message or name not in _OUR_FIELDS):
            yield name, value


def _has_decimal_form(value: int) -> bool:
    """Whether Python converts it to decimal digits: above ``sys.get_int_max_str_digits()`` that raises ValueError."""
    try:
        int.__repr__(value)
    except ValueError:
        return False
    return True


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # of the program's object: the line must not be lost
        return f"{type(value).__name__} object whose __repr__ raises,"


def _text(value: object) -> str:
    """The value as bounded text. Lone surrogates (bytes that were not UTF-8) are escaped, so that every JSON parser
    accepts the line."""
    try:
        text = str(value)
    except Exception:  # of the program's object: the line must not be lost
        text = f"{type(value).__name__} object whose __str__ raises"
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]} ... {len(text) - 2 * half} characters left out ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def configure_logging(level: str, log_format: str) -> None:
    """Sends the process's log to standard error. A reader that stalls costs log lines, and never stops the process."""
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # hides the start and stop of the metrics port
    handler = StderrHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=level.upper(), handlers=[handler])
        logging.captureWarnings(True)
    else:
        form = f"%(asctime)s %(levelname)s {os.getpid()} %(name)s: %(message)s"
        handler.setFormatter(TextFormatter(form))
        logging.basicConfig(level=level.upper(), handlers=[handler])


def flush_logs() -> None:
    """For a process that ends with ``os._exit``, which runs no exit handlers."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def logs_json() -> bool:
    """Whether this process writes JSON lines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
