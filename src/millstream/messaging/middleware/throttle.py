"""Starts handlers at a limited rate. No message is refused: messages wait, which slows down reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from millstream.errors import InvalidArgument
from millstream.messaging.handler import Handler, Middleware, Output, wait_for_turn
from millstream.messaging.message import Message
from millstream.model import milliseconds


class RateLimit:
    """Decides when the next handler may start: evenly spaced, after a burst that grows during idle time. Pure."""

    def __init__(self, interval: float, burst: int) -> None:
        self._interval = interval
        self._credit = interval * (burst - 1)
        self._next = float("-inf")

    def reserve(self, now: float) -> float:
        """Reserves the next start; returns how long to wait for it."""
        place = max(self._next, now)
        self._next = place + self._interval
        return max(0.0, place - self._credit - now)


def throttle(
    count: int,
    *,
    per_ms: int | None = None,
    burst: int = 1,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Middleware:
    """At most ``count`` starts in ``per_ms`` (1,000) in this process, over all handlers that one middleware wraps."""
    if count < 1:
        raise InvalidArgument("throttle.count", count, "a number of at least 1")
    if burst < 1:
        raise InvalidArgument("throttle.burst", burst, "a number of at least 1")
    pace = RateLimit(milliseconds("per", per_ms, 1_000, least=1) / 1000 / count, burst)

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            if (wait := pace.reserve(now())) > 0:
                await wait_for_turn(message, sleep(wait))
            return await handler(message)

        return handle

    return middleware
