"""Turns errors that would end the process into an Exception: sys.exit() in a library, an inner cancellation.

Subscribers classify the errors of a handler in the same way. This middleware is for a ``retry`` or a ``poison_queue``
around it, which catch only Exceptions.
"""

from __future__ import annotations

import asyncio

from millstream.messaging.handler import Handler, Middleware, Output, failure_of
from millstream.messaging.message import Message


def recoverer() -> Middleware:
    """Raises HandlerCrashed instead of SystemExit, GeneratorExit and the like, and HandlerCancelled where something
    that the handler waited for was cancelled. KeyboardInterrupt and a cancellation of the task itself pass."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            task = asyncio.current_task()
            try:
                return await handler(message)
            except Exception:  # a failure already
                raise
            except BaseException as error:  # see ``failure_of``
                failure = failure_of(error, task)
                if failure is None:
                    raise
                raise failure from error

        return handle

    return middleware
