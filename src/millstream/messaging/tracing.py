"""What publishers and subscribers report to a tracer, and the tracer of this process.

``active`` is None unless ``millstream.observe.enable_tracing`` was called. Without tracing a message costs one
comparison per report, and OpenTelemetry is not imported. The methods of a tracer never raise an error of their own: a
broken exporter or sampler costs telemetry, never a message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from millstream.messaging.handler import Handler
from millstream.messaging.message import Message


class Tracer(Protocol):
    """Times named ``began_s`` are monotonic seconds."""

    def publishing(self, topic: str, messages: Sequence[Message]) -> AbstractContextManager[Sequence[Message]]:
        """Covers one call of ``publish``. Yields the messages with the trace context in their metadata."""

    def traced_handler(self, handler: Handler, topic: str, group: str | None, *, has_outputs: bool) -> Handler:
        """Returns the handler, wrapped so that each delivery has a span. Its outputs carry the context of that span."""

    def received(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        """A read returned these messages."""

    def acked(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        """The broker confirmed the acknowledgement of these messages."""

    def retried(self, topic: str, group: str, messages: Collection[Message], began_s: float) -> None:
        """These messages will be redelivered after a delay."""

    def dead_lettered(self, topic: str, group: str, message: Message, error_type: str, began_s: float) -> None:
        """The message is in the dead-letter stream."""

    def outputs_stored(self, topic: str, count: int) -> None:
        """``count`` outputs of handlers are stored in the stream ``topic``."""

    def replayed(self, topic: str, entries: Sequence[dict[bytes, bytes]], began_s: float) -> None:
        """These entries were moved from a dead-letter stream to ``topic``."""

    def current_ids(self) -> tuple[str, str] | None:
        """The trace id and the span id of the code that is running, as hexadecimal text; None outside of a span."""


active: Tracer | None = None
"""The tracer of this process; None: tracing is disabled."""


def activate(tracer: Tracer | None) -> None:
    """Replaces the tracer. Handlers that run already keep the one with which their subscription started."""
    global active  # noqa: PLW0603 (one tracer per process, as in OpenTelemetry)
    active = tracer
