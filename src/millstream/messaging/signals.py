"""Ending in good order when the process is told to: SIGTERM and SIGINT close what runs, and then are as they were."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

R = TypeVar("R")


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

    def heard(number: signal.Signals) -> None:
        if closing:
            log.warning("%s again: not waiting any longer", number.name)
            running.cancel()
            closing[0].cancel()
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
