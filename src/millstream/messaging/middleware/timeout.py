"""Ends a handler that takes too long: it is cancelled, and its message counts as failed."""

from __future__ import annotations

import asyncio

from millstream.messaging.errors import HandlerTimedOut
from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message
from millstream.model import milliseconds


def timeout(*, limit_ms: int) -> Middleware:
    """Raises HandlerTimedOut after ``limit_ms``. A TimeoutError of the handler itself is raised unchanged.

    A handler that runs in a thread continues there until it returns, because threads cannot be cancelled.
    """
    after = milliseconds("limit", limit_ms, 0, least=1) / 1000

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            try:
                async with asyncio.timeout(after) as scope:
                    return await handler(message)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise HandlerTimedOut(after) from error

        return handle

    return middleware
