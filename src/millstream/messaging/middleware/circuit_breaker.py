"""Circuit breaker: stops calling a handler that keeps failing, and tries one message per reset time until it works.

While the circuit is open, messages are retried later and their deliveries are not counted, so a long outage
dead-letters nothing. The calls that failed are counted, one trial per reset time among them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Literal

from millstream.errors import InvalidArgument
from millstream.messaging.errors import CircuitOpen, Rejected
from millstream.messaging.handler import Handler, Middleware, Output, wait_for_turn
from millstream.messaging.message import Message
from millstream.model import milliseconds


class CircuitState(Enum):
    CLOSED = "closed"
    """Everything passes; consecutive failures are counted."""
    OPEN = "open"
    """Nothing passes until the reset time."""
    HALF_OPEN = "half open"
    """One trial message is being handled. Its result closes or opens the circuit."""


class Circuit:
    """Decides whether a message passes. The caller passes the current time. Pure."""

    def __init__(self, failures: int, reset_after: float) -> None:
        self._limit = failures
        self._reset_after = reset_after
        self._failed = 0
        self._opens_until = 0.0
        self.state = CircuitState.CLOSED

    def enter(self, now: float) -> float:
        """0.0 if the message passes; then call ``succeeded`` or ``failed``. Otherwise the time to wait."""
        if self.state is CircuitState.CLOSED:
            return 0.0
        if self.state is CircuitState.OPEN and now >= self._opens_until:
            self.state = CircuitState.HALF_OPEN
            return 0.0
        # Another message is on trial. Its end is not known, so the caller tries again after at most the reset time.
        return self._opens_until - now if self.state is CircuitState.OPEN else self._reset_after

    def succeeded(self) -> None:
        self._failed = 0
        self.state = CircuitState.CLOSED

    def failed(self, now: float) -> None:
        self._failed += 1
        if self.state is CircuitState.HALF_OPEN or self._failed >= self._limit:
            self.state = CircuitState.OPEN
            self._opens_until = now + self._reset_after

    def cancelled(self, now: float) -> None:
        """Records a call that was cancelled. If it was the trial, the next message is the trial."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN
            self._opens_until = now


def circuit_breaker(
    failures: int = 5,
    *,
    reset_after_ms: int | None = None,
    when_open: Literal["wait", "raise"] = "wait",
    ignore: tuple[type[Exception], ...] = (),
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Middleware:
    """Opens after ``failures`` failures in a row, for ``reset_after_ms`` (30,000). One circuit per wrapped handler.

    ``when_open="wait"``: messages wait in flight, with heartbeats. They fill ``max_in_flight``, so reading stops.
    ``when_open="raise"``: messages are redelivered after the next trial (CircuitOpen, a RetryLater that is not
    charged), so reading continues. ``ignore``: errors that do not show whether the service behind the handler works,
    such as those of an invalid message; ``Rejected`` is always one of them.
    """
    if failures < 1:
        raise InvalidArgument("circuit_breaker.failures", failures, "a number of at least 1")
    if when_open not in ("wait", "raise"):
        raise InvalidArgument("circuit_breaker.when_open", when_open, "'wait' or 'raise'")
    after = milliseconds("reset_after", reset_after_ms, 30_000, least=1) / 1000
    ignored: tuple[type[Exception], ...] = (Rejected, *ignore)

    def middleware(handler: Handler) -> Handler:
        circuit = Circuit(failures, after)

        async def handle(message: Message) -> Output:
            while (wait := circuit.enter(now())) > 0:
                if when_open == "raise":
                    raise CircuitOpen(wait)
                pause_s = min(wait, after / 4) if circuit.state is CircuitState.HALF_OPEN else wait
                await wait_for_turn(message, sleep(pause_s))
            try:
                output = await handler(message)
            except ignored:
                circuit.succeeded()
                raise
            except Exception:  # of a handler
                circuit.failed(now())
                raise
            except BaseException:  # cancelled: says nothing about what the handler calls
                circuit.cancelled(now())
                raise
            circuit.succeeded()
            return output

        return handle

    return middleware
