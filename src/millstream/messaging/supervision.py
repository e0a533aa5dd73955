"""No part dies silently, and none goes on when the process is told to end.

A loop that meets what nobody foresaw is told about, counted, and begun again after a pause; it ends only for errors
that cannot pass, and those reach whoever waits for it. An outage of the broker is told once when it begins and once
when it ends, however often it is tried in between. SIGTERM and SIGINT close what runs, and then are as they were.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from millstream.errors import MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import Backoff, Observer, monotonic_ms

log = logging.getLogger(__name__)

RESTART = Backoff(initial_ms=50, max_ms=30_000, jitter=0.5)
HEALTHY_MS = 60_000
"""A part that ran for so long has recovered: the next pause is a short one again."""
STEPS_TO_CLOSE = 10
"""Turns of the loop in which closing, its parts and theirs have all begun."""
R = TypeVar("R")


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


class Outage:
    """Belongs to one publisher or subscriber. Topics fail and work; the outage lasts while any of them fails."""

    def __init__(self, what: str, observer: Observer) -> None:
        """``what``: what cannot be done meanwhile, as a verb: "publish", "read"."""
        self._what = what
        self._observer = observer
        self._failing: set[str] = set()
        self._began_ms = 0.0

    def failed(self, topic: str, error: Exception) -> None:
        if not self._failing:
            self._began_ms = monotonic_ms()
            log.warning("cannot %s (first seen on %s), trying again until it works: %s", self._what, topic, error)
            self._observer("messaging.outage_began", what=self._what, topic=topic, error=str(error))
        self._failing.add(topic)

    def worked(self, topic: str) -> None:
        """Also for a topic that nobody will try again."""
        if topic not in self._failing:
            return
        self._failing.discard(topic)
        if not self._failing:
            seconds = (monotonic_ms() - self._began_ms) / 1000
            log.warning("can %s again, after %.1f s", self._what, seconds)
            self._observer("messaging.outage_ended", what=self._what, seconds=seconds)


async def run_until_signalled(
    run: Awaitable[R],
    close: Callable[[], Awaitable[Any]],
    *,
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> R | None:
    """Runs until it ends by itself or a signal comes; then calls ``close`` and waits for both to end.

    ``await run_until_signalled(subscriber.consume("orders", handle), subscriber.close)``. The first signal closes: no
    more is read, handlers finish, the rest is handed back. A second one cancels, for people in a hurry. The signal
    handlers that were there before are put back. Returns what ``run`` returned, None where it was cancelled.
    In the main thread of a process only.
    """
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(run)
    closing: list[asyncio.Future[Any]] = []
    hurrying: list[asyncio.Future[None]] = []

    async def hurry() -> None:
        # Both signals may come in one turn of the loop: cancelled before it has told its parts to end, closing would
        # not have begun, and what is cancelled would take its time.
        for _ in range(STEPS_TO_CLOSE):
            await asyncio.sleep(0)
        running.cancel()
        closing[0].cancel()

    def heard(number: signal.Signals) -> None:
        if closing:
            log.warning("%s again: not waiting any longer", number.name)
            hurrying.append(asyncio.ensure_future(hurry()))
            return
        log.info("%s: closing", number.name)
        closing.append(asyncio.ensure_future(close()))

    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        loop.add_signal_handler(number, heard, number)
    try:
        await asyncio.wait([running])
        for one in closing:
            await asyncio.wait([one])
            if not one.cancelled() and (error := one.exception()) is not None:
                log.error("closing failed", exc_info=error)
        return None if running.cancelled() else running.result()
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if not running.done():
            running.cancel()
            await asyncio.wait([running])
