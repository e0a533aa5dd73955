"""Ends a handler that takes too long: it is cancelled, and its message counts as failed.

A batch that takes too long does not show which of its messages is the cause: each is redelivered and handled alone.
"""

from __future__ import annotations

import asyncio
import logging

from millstream.messaging.errors import HandlerTimedOut, RetryLater
from millstream.messaging.handler import Handler, Middleware, Output, forget_left_batch
from millstream.messaging.message import Message
from millstream.model import milliseconds

log = logging.getLogger(__name__)


def timeout(*, limit_ms: int) -> Middleware:
    """Raises HandlerTimedOut after ``limit_ms``. A TimeoutError of the handler itself is raised unchanged.

    Of a batch of several messages, each is redelivered and handled alone, and the delivery is not counted.
    A handler that runs in a thread continues there until it returns, because threads cannot be cancelled.
    """
    after = milliseconds("limit", limit_ms, 0, least=1) / 1000

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            forget_left_batch()
            try:
                async with asyncio.timeout(after) as scope:
                    return await handler(message)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                if not forget_left_batch():
                    raise HandlerTimedOut(after) from error
                log.warning(
                    "the batch of message %s of topic %r did not end within %g s; the message is redelivered and "
                    "handled alone",
                    *(message.id, message.topic, after),
                )
                raise RetryLater(f"its batch did not end within {after:g} s", charged=False) from error

        return handle

    return middleware
