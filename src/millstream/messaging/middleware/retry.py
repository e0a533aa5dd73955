"""Calls a failed handler again within the same delivery, with growing pauses; then raises its last error.

For errors that last seconds. The message stays in flight meanwhile, with heartbeats. For longer waits let the handler
fail, so that the subscriber redelivers the message later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from millstream.errors import InvalidArgument
from millstream.messaging.errors import Rejected, RetryLater
from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message
from millstream.model import Backoff, milliseconds


def retry(
    max_retries: int = 3,
    *,
    initial_interval_ms: int | None = None,
    max_interval_ms: int | None = None,
    multiplier: float = 2.0,
    randomization_factor: float = 0.5,
    max_elapsed_time_ms: int | None = None,
    permanent: tuple[type[Exception], ...] = (),
    on_retry: Callable[[Message, Exception, int], None] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    now: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = random.random,
) -> Middleware:
    """At most ``1 + max_retries`` calls of the handler for one delivery, and none after ``max_elapsed_time_ms``. Pauses
    grow from ``initial_interval_ms`` (100) to ``max_interval_ms`` (10,000).

    Errors of the ``permanent`` types are never retried: the message is dead-lettered at once. ``Rejected`` and
    ``RetryLater`` already name the outcome, and are raised unchanged. Raises the handler's last error.
    """
    if max_retries < 0:
        raise InvalidArgument("retry.max_retries", max_retries, "a number that is not negative")
    if multiplier < 1:
        raise InvalidArgument("retry.multiplier", multiplier, "a number of at least 1")
    if not 0 <= randomization_factor <= 1:
        raise InvalidArgument("retry.randomization_factor", randomization_factor, "a number between 0 and 1")
    backoff = Backoff(
        initial_ms=milliseconds("initial_interval", initial_interval_ms, 100),
        max_ms=milliseconds("max_interval", max_interval_ms, 10_000),
        factor=multiplier,
        jitter=randomization_factor,
    )
    limit = None
    if max_elapsed_time_ms is not None:
        limit = milliseconds("max_elapsed_time", max_elapsed_time_ms, 0) / 1000

    def middleware(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            started = now()
            failures = 0
            while True:
                try:
                    return await handler(message)
                except (Rejected, RetryLater):
                    raise
                except permanent as error:
                    raise Rejected(f"{type(error).__name__}: {error}") from error
                except Exception as error:  # of a handler
                    failures += 1
                    pause = backoff.delay_ms(failures, chance()) / 1000
                    too_late = limit is not None and now() - started + pause > limit
                    # The handler has settled the message: another call would settle it a second time.
                    if failures > max_retries or too_late or message.settled is not None:
                        raise
                    if on_retry is not None:
                        on_retry(message, error, failures)
                await sleep(pause)

        return handle

    return middleware
