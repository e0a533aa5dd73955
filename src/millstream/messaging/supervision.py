"""Supervision of background tasks: restarts after unexpected errors, outage reports, and a clean end on signals.

A task that fails with an unexpected error is logged, counted, and restarted after a pause. It ends only for permanent
errors, which are raised in the task that waits for it. An outage of the broker is logged once when it begins and once
when it ends. SIGTERM and SIGINT close what runs; the previous signal handlers are restored afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from millstream.errors import BrokerClosed, MillstreamError
from millstream.messaging.failure import text_of
from millstream.model import Backoff, Observer, monotonic_ms

log = logging.getLogger(__name__)

RESTART = Backoff(initial_ms=50, max_ms=30_000, jitter=0.5)
HEALTHY_MS = 60_000
"""A part that ran for so long has recovered: the next pause is a short one again."""
STEPS_TO_CLOSE = 10
"""Turns of the event loop after which closing has begun in all parts, and in their parts."""
R = TypeVar("R")


def is_worth_retrying(error: BaseException) -> bool:
    """Whether trying again may help: after transient errors of the broker, and after unexpected errors. The latter are
    bugs of this package or of a driver, and a loop that ended because of one would leave its work undone."""
    if isinstance(error, MillstreamError):
        return error.retryable
    return isinstance(error, Exception)


def is_open(error: BaseException) -> bool:
    """Whether to try again as long as the broker is open, for parts whose end nothing else would notice. Permanent
    errors are included, because an operator may correct a permission or a key of another type."""
    return isinstance(error, Exception) and not isinstance(error, BrokerClosed)


async def keep_running(
    part: Callable[[], Awaitable[None]],
    name: str,
    emit: Callable[..., Any],
    *,
    repeats: Callable[[BaseException], bool] = is_worth_retrying,
) -> None:
    """Runs ``part`` until it returns, is cancelled, or raises an error that is not to be repeated: by default a
    permanent one."""
    failures = 0
    while True:
        began = monotonic_ms()
        try:
            return await part()
        except Exception as error:  # of any kind: see ``is_worth_retrying``
            if not repeats(error):
                raise
            failures = 1 if monotonic_ms() - began > HEALTHY_MS else failures + 1
            if isinstance(error, MillstreamError):  # such as an unavailable broker: a traceback adds nothing
                log.warning("the %s failed; restarting: %s", name, error)
            else:
                log.exception("the %s failed with an unexpected error; restarting", name)
            emit("messaging.part_restarted", part=name, error=text_of(error), error_type=type(error).__name__)
        await asyncio.sleep(RESTART.delay_ms(failures, random.random()) / 1000)  # noqa: S311 (jitter, not a secret)


class Outage:
    """Reports an outage of one publisher or subscriber once. It lasts as long as any of its topics fails."""

    def __init__(self, verb: str, observer: Observer) -> None:
        """``verb``: for the log, "publish" or "read"."""
        self._verb = verb
        self._observer = observer
        self._failing: set[str] = set()
        self._began_ms = 0.0

    def failed(self, topic: str, error: Exception) -> None:
        if not self._failing:
            self._began_ms = monotonic_ms()
            log.warning("cannot %s (first seen on %s), trying again until it works: %s", self._verb, topic, error)
            self._observer("messaging.outage_began", what=self._verb, topic=topic, error=str(error))
        self._failing.add(topic)

    def worked(self, topic: str) -> None:
        if self._is_over_without(topic):
            log.warning("can %s again, after %.1f s", self._verb, self._end_s())

    def forget(self, topic: str) -> None:
        """The topic is closed. That proves nothing about the server, so no recovery is logged."""
        if self._is_over_without(topic):
            log.info("closed during an outage: could not %s for %.1f s", self._verb, self._end_s())

    def _is_over_without(self, topic: str) -> bool:
        if topic not in self._failing:
            return False
        self._failing.discard(topic)
        return not self._failing

    def _end_s(self) -> float:
        seconds = (monotonic_ms() - self._began_ms) / 1000
        self._observer("messaging.outage_ended", what=self._verb, seconds=seconds)
        return seconds


async def run_until_signalled(
    run: Awaitable[R],
    close: Callable[[], Awaitable[Any]],
    *,
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> R | None:
    """Runs until it ends or a signal is received; then calls ``close`` and waits for both to end.

    ``await run_until_signalled(subscriber.consume("orders", handle), subscriber.close)``. The first signal closes: no
    more is read, running handlers finish, and the other messages are returned. A second signal cancels. The previous
    signal handlers are restored at the end. Several calls in one event loop share the signals: a signal closes all of
    them, and the handlers are restored when the last one ends. Returns what ``run`` returned, None if it was
    cancelled.
    In the main thread of a process only.
    """
    running = asyncio.ensure_future(run)
    closing: list[asyncio.Future[Any]] = []
    cancelling: list[asyncio.Future[None]] = []

    async def cancel_soon() -> None:
        # Both signals may arrive in one turn of the loop. If closing were cancelled before it has begun in all parts,
        # those parts would not end.
        for _ in range(STEPS_TO_CLOSE):
            await asyncio.sleep(0)
        running.cancel()
        closing[0].cancel()

    def received(number: signal.Signals) -> None:
        if closing:
            log.warning("%s again: not waiting any longer", number.name)
            cancelling.append(asyncio.ensure_future(cancel_soon()))
            return
        log.info("%s: closing", number.name)
        closing.append(asyncio.ensure_future(close()))

    registered = [_LoopSignal.register(number, received) for number in signals]
    try:
        await asyncio.wait([running])
        for close_task in closing:
            await asyncio.wait([close_task])
            if not close_task.cancelled() and (error := close_task.exception()) is not None:
                log.error("closing failed", exc_info=error)
        return None if running.cancelled() else running.result()
    finally:
        for loop_signal in registered:
            loop_signal.unregister(received)
        if not running.done():
            running.cancel()
            await asyncio.wait([running])


class _LoopSignal:
    """One signal in one event loop, and everything that it closes.

    An event loop has one handler for each signal. Without a shared registry, the second ``run_until_signalled`` of a
    loop would replace the handler of the first.
    """

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[signal.Signals, _LoopSignal]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._callbacks: list[Callable[[signal.Signals], None]] = []
        self._previous = signal.getsignal(number)
        asyncio.get_running_loop().add_signal_handler(number, self._received)

    @classmethod
    def register(cls, number: signal.Signals, callback: Callable[[signal.Signals], None]) -> _LoopSignal:
        registry = cls._of_loop.setdefault(asyncio.get_running_loop(), {})
        if number not in registry:
            registry[number] = cls(number)
        registry[number]._callbacks.append(callback)
        return registry[number]

    def unregister(self, callback: Callable[[signal.Signals], None]) -> None:
        """Restores the previous signal handler when the last callback is removed."""
        self._callbacks.remove(callback)
        if not self._callbacks:
            loop = asyncio.get_running_loop()
            del self._of_loop[loop][self._number]
            loop.remove_signal_handler(self._number)
            signal.signal(self._number, self._previous)

    def _received(self) -> None:
        for callback in list(self._callbacks):
            callback(self._number)
