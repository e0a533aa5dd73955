"""Emits an observer event for each call of a handler. ``millstream.observe`` turns the events into metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream.messaging.handler import Handler, Middleware, Output, as_messages, current_handler
from millstream.messaging.message import Message
from millstream.model import Observer
from millstream.model.policies import guarded

HANDLED = "messaging.handled"


def metrics(observer: Observer, *, now: Callable[[], float] = time.monotonic) -> Middleware:
    """Emits ``messaging.handled`` for each call, with handler, topic, group, seconds, outputs and error. ``error`` is
    empty or the name of the error's class, and never its text, which would create too many label values."""
    observer = guarded(observer)

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            running = current_handler()
            labels = {"handler": running.handler, "topic": running.topic, "group": running.group}
            started = now()
            try:
                output = await handler(message)
            except BaseException as error:  # of a handler; also a cancelled call is counted
                observer(HANDLED, **labels, seconds=now() - started, outputs=0, error=type(error).__name__)
                raise
            observer(HANDLED, **labels, seconds=now() - started, outputs=len(as_messages(output)), error="")
            return output

        return handle

    return middleware
