"""Turns what would end the process into an error of one message: sys.exit() in a library, a stray cancellation.

Subscribers judge in the same way what leaves a handler. This one is for the inside: for a ``retry`` or a
``poison_queue`` around it, which see Exceptions alone.
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
            except Exception:
                raise
            except BaseException as error:
                failure = failure_of(error, task)
                if failure is None:
                    raise
                raise failure from error

        return handle

    return middleware
