"""For tests: calls the handler twice for every message, like a redelivery, or lets handlers fail at random, before or
after they run. An idempotent handler passes. The same seed gives the same failures.
"""

from __future__ import annotations

import random

from millstream.errors import InvalidArgument
from millstream.messaging.errors import InjectedFailure
from millstream.messaging.handler import Handler, Middleware, Output, as_messages
from millstream.messaging.message import Message


def duplicate() -> Middleware:
    """Publishes the outputs of both calls. The second call gets a copy, because handlers may change the message."""

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            first = as_messages(await handler(message.copy()))
            second = as_messages(await handler(message))
            return [*first, *second]

        return handle

    return middleware


def fail_randomly(probability: float, *, seed: int, after: bool = False) -> Middleware:
    """Fails with InjectedFailure. ``after=True`` lets the handler run first, which is the harder case: its effects
    exist, and the message is redelivered. ``seed`` must be given, so that a failing run can be replayed."""
    if not 0 <= probability <= 1:
        raise InvalidArgument("fail_randomly.probability", probability, "a number between 0 and 1")
    dice = random.Random(seed)  # noqa: S311 (a test's dice, which must be repeatable)

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            fails = dice.random() < probability
            if fails and not after:
                raise InjectedFailure(seed)
            output = await handler(message)
            if fails:
                raise InjectedFailure(seed)
            return output

        return handle

    return middleware
