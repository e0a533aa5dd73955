"""Publishes a message whose handler fails to another topic, with the reason, and acknowledges it.

The subscriber dead-letters failed messages by itself, atomically; this is for a poison topic that other programs read.
The message is published to the poison topic before it is acknowledged: at least once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millstream.errors import InvalidArgument
from millstream.messaging.errors import RetryLater
from millstream.messaging.failure import text_of
from millstream.messaging.handler import Handler, Middleware, Output, current_handler
from millstream.messaging.message import Message

REASON = "reason_poisoned"
TOPIC = "topic_poisoned"
HANDLER = "handler_poisoned"
SUBSCRIBER = "subscriber_poisoned"


class Publishes(Protocol):
    async def publish(self, topic: str, /, *messages: Message) -> object: ...


def poison_queue(
    publisher: Publishes, topic: str, *, poisons: Callable[[Exception], bool] = lambda error: True
) -> Middleware:
    """Errors for which ``poisons`` is false are raised again, to be retried, and so is ``RetryLater``, for example of
    an open circuit. Put ``retry`` inside this middleware."""
    if not topic:
        raise InvalidArgument("poison_queue.topic", topic, "the name of a topic")

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            try:
                return await handler(message)
            except RetryLater:
                raise
            except Exception as error:  # of a handler
                if not poisons(error):
                    raise
                running = current_handler()
                await publisher.publish(
                    topic,
                    Message(
                        message.payload,
                        {
                            **message.metadata,
                            REASON: text_of(error),
                            TOPIC: message.topic or running.topic,
                            HANDLER: running.handler,
                            SUBSCRIBER: message.group or running.group or "",
                        },
                        message.uuid,
                    ),
                )
                return None

        return handle

    return middleware
