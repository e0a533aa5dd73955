"""Stops calling a handler that keeps failing, and tries one message now and then until it works again.

A message that meets an open circuit has not met its handler, and is not charged for it: however long the outage is,
being refused buries nothing. What is charged are the calls that failed, one trial each reset time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Literal

from millstream.errors import InvalidArgument
from millstream.messaging.errors import CircuitOpen, Rejected
from millstream.messaging.handler import Handler, Middleware, Output
from millstream.messaging.message import Message
from millstream.model import Seconds, milliseconds


class CircuitState(Enum):
    CLOSED = "closed"
    """Everything passes; consecutive failures are counted."""
    OPEN = "open"
    """Nothing passes until the reset time."""
    HALF_OPEN = "half open"
    """One trial is under way; it decides."""


class Circuit:
    """The decisions, given the time. Pure."""

    def __init__(self, failures: int, reset_after: float) -> None:
        self._limit = failures
        self._reset_after = reset_after
        self._failed = 0
        self._opens_until = 0.0
        self.state = CircuitState.CLOSED

    def enter(self, now: float) -> float:
        """0.0: go ahead (and then say ``succeeded`` or ``failed``). Otherwise how long to wait before asking again."""
        if self.state is CircuitState.CLOSED:
            return 0.0
        if self.state is CircuitState.OPEN and now >= self._opens_until:
            self.state = CircuitState.HALF_OPEN
            return 0.0
        # Someone else's trial is under way: its end is not known, so ask again after at most the reset time.
        return self._opens_until - now if self.state is CircuitState.OPEN else self._reset_after

    def succeeded(self) -> None:
        self._failed = 0
        self.state = CircuitState.CLOSED

    def failed(self, now: float) -> None:
        self._failed += 1
        if self.state is CircuitState.HALF_OPEN or self._failed >= self._limit:
            self.state = CircuitState.OPEN
            self._opens_until = now + self._reset_after

    def gave_up(self, now: float) -> None:
        """A call ended without telling anything (it was cancelled): a trial must not stay under way for ever."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN
            self._opens_until = now


def circuit_breaker(
    failures: int = 5,
    reset_after: Seconds | None = None,
    *,
    reset_after_ms: int | None = None,
    when_open: Literal["wait", "raise"] = "wait",
    ignore: tuple[type[Exception], ...] = (),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Middleware:
    """Opens after ``failures`` failures in a row, for ``reset_after_ms`` (30,000). One circuit per wrapped handler.

    ``when_open``: ``wait`` holds the message here, kept alive by the heartbeat, which fills ``max_in_flight`` and so
    stops the reading; ``raise`` puts it off until the next trial (CircuitOpen, a RetryLater that is not charged), so
    that reading goes on. ``ignore`` names errors that say nothing about the service behind (a bad message);
    ``Rejected`` is one of them always.
    """
    if failures < 1:
        raise InvalidArgument("circuit_breaker.failures", failures, "a number of at least 1")
    if when_open not in ("wait", "raise"):
        raise InvalidArgument("circuit_breaker.when_open", when_open, "'wait' or 'raise'")
    after = milliseconds("reset_after", reset_after_ms, 30_000, reset_after, least=1) / 1000
    ignored: tuple[type[Exception], ...] = (Rejected, *ignore)

    def middleware(handler: Handler) -> Handler:
        circuit = Circuit(failures, after)

        async def handle(message: Message) -> Output:
            while (wait := circuit.enter(now())) > 0:
                if when_open == "raise":
                    raise CircuitOpen(wait)
                await sleep(min(wait, after / 4) if circuit.state is CircuitState.HALF_OPEN else wait)
            try:
                output = await handler(message)
            except ignored:
                circuit.succeeded()
                raise
            except Exception:
                circuit.failed(now())
                raise
            except BaseException:
                circuit.gave_up(now())
                raise
            circuit.succeeded()
            return output

        return handle

    return middleware
