"""One id for everything that follows from one message: it goes into all that the handler puts out."""

from __future__ import annotations

from contextvars import ContextVar

from millstream.messaging.handler import Handler, Middleware, Output, as_messages
from millstream.messaging.message import Message

CORRELATION_ID = "correlation_id"
CARRIED = (CORRELATION_ID, "traceparent", "tracestate")
"""Metadata keys that pass from a message to those that follow from it; W3C trace context among them."""

_current: ContextVar[dict[str, str]] = ContextVar("millstream_correlation")


def correlated(message: Message) -> Message:
    """Marks a message that a handler publishes by itself, as the middleware marks those that it returns."""
    for key, value in _current.get({}).items():
        message.metadata.setdefault(key, value)
    return message


def correlation() -> Middleware:
    """What has no correlation id starts one: its own uuid. An output that carries one already keeps it."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            carried = {key: message.metadata[key] for key in CARRIED if key in message.metadata}
            carried.setdefault(CORRELATION_ID, message.uuid)
            token = _current.set(carried)
            try:
                output = await handler(message)
                return [correlated(each) for each in as_messages(output)] if output is not None else None
            finally:
                _current.reset(token)

        return handle

    return middleware
