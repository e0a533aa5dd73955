"""No part dies silently: a loop that meets what nobody foresaw is told about, counted, and begun again after a pause.

It ends only for errors that cannot pass, and those reach whoever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from millstream.errors import MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import Backoff, monotonic_ms

log = logging.getLogger(__name__)

RESTART = Backoff(initial_ms=50, max_ms=30_000, jitter=0.5)
HEALTHY_MS = 60_000
"""A part that ran for so long has recovered: the next pause is a short one again."""


def can_pass(error: BaseException) -> bool:
    """Whether trying again may help: what the broker says may pass, and what nobody foresaw. The latter is a bug, ours
    or a driver's, and a loop that ends for it leaves work lying."""
    if isinstance(error, MillstreamError):
        return error.retryable
    return isinstance(error, Exception)


async def keep_running(part: Callable[[], Awaitable[None]], name: str, tell: Callable[..., Any]) -> None:
    """Runs ``part`` until it returns, is cancelled, or raises what cannot pass."""
    failures = 0
    while True:
        began = monotonic_ms()
        try:
            return await part()
        except Exception as error:
            if not can_pass(error):
                raise
            failures = 1 if monotonic_ms() - began > HEALTHY_MS else failures + 1
            log.exception("the %s met what nobody foresaw, and begins again", name)
            tell("messaging.part_restarted", part=name, error=text_of(error), error_type=type(error).__name__)
        await asyncio.sleep(RESTART.delay_ms(failures, random.random()) / 1000)  # noqa: S311 (jitter, not a secret)
