"""Turns what would end the process into an error of one message: sys.exit() in a library, a stray cancellation."""

from __future__ import annotations

import asyncio

from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message
from millstream.messaging.middleware.errors import HandlerCrashed


def recoverer() -> Middleware:
    """Raises HandlerCrashed instead of SystemExit, GeneratorExit and the like. KeyboardInterrupt passes, and so does a
    cancellation that was meant for this task; one that came out of the handler's own work does not."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            try:
                return await handler(message)
            except (Exception, KeyboardInterrupt):
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise HandlerCrashed(error) from error
            except BaseException as error:
                raise HandlerCrashed(error) from error

        return handle

    return middleware
