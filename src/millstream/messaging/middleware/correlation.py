"""Copies the correlation id and the trace context of a message to all outputs of its handler."""

from __future__ import annotations

from contextvars import ContextVar

from millstream.messaging.handler import Handler, Middleware, Output, as_messages
from millstream.messaging.message import Message

CORRELATION_ID = "correlation_id"
CARRIED = (CORRELATION_ID, "traceparent", "tracestate")
"""Metadata keys that are copied from a message to its outputs, including the W3C trace context."""

_current: ContextVar[dict[str, str]] = ContextVar("millstream_correlation")


def correlated(message: Message) -> Message:
    """Copies the metadata to a message that a handler publishes itself, as the middleware does for returned
    messages."""
    for key, value in _current.get({}).items():
        message.metadata.setdefault(key, value)
    return message


def correlation() -> Middleware:
    """A message without a correlation id starts one: its own uuid. An output that has one already keeps it."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            carried = {key: message.metadata[key] for key in CARRIED if key in message.metadata}
            carried.setdefault(CORRELATION_ID, message.uuid)
            token = _current.set(carried)
            try:
                output = await handler(message)
                return [correlated(sent) for sent in as_messages(output)] if output is not None else None
            finally:
                _current.reset(token)

        return handle

    return middleware
