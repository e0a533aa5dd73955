"""For tests: every message reaches the handler twice, as a redelivery would. A handler that is idempotent passes."""

from __future__ import annotations

from millstream.messaging.handler import Handler, Middleware, Output, as_messages
from millstream.messaging.message import Message


def duplicate() -> Middleware:
    """The outputs of both calls are put out. The second call gets a message of its own, for handlers that change it."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            first = as_messages(await handler(message.copy()))
            second = as_messages(await handler(message))
            return [*first, *second]

        return handle

    return middleware
