"""Moves a message whose handler fails to a topic of its own, with the reason, and goes on.

The subscriber buries hopeless messages by itself, atomically; this is for a poison topic that other programs read. The
poison topic is written first and the message acknowledged after: at least once.
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
    """An error for which ``poisons`` is false passes on, to be retried, and so does ``RetryLater``, which asks for it
    (an open circuit is one). Put ``retry`` inside of this one."""
    if not topic:
        raise InvalidArgument("poison_queue.topic", topic, "the name of a topic")

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            try:
                return await handler(message)
            except RetryLater:
                raise
            except Exception as error:
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
