"""What middleware raises in a handler's place."""

from __future__ import annotations

import math

from millstream.errors import MillstreamError
from millstream.messaging.errors import HandlerCrashed, RetryLater

__all__ = ["CircuitOpen", "HandlerCrashed", "HandlerTimedOut", "InjectedFailure"]


class HandlerTimedOut(MillstreamError):
    """The handler was cancelled because it took longer than it may. ``after_s`` is the limit."""

    retryable = True
    after_s: float

    def __init__(self, after_s: float) -> None:
        super().__init__(
            f"the handler did not finish within {after_s:g} s. Raise the limit, or do less.", after_s=after_s
        )


class CircuitOpen(RetryLater):
    """The circuit breaker refused to start the handler. ``retry_after_s`` says when it will try again.

    The message comes back then, and the start that did not happen is not counted.
    """

    retry_after_s: float

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            f"the circuit is open for another {retry_after_s:.1f} s. Look at why the handler failed before.",
            delay_ms=math.ceil(retry_after_s * 1000),
            charged=False,
        )
        self.retry_after_s = retry_after_s


class InjectedFailure(MillstreamError):
    """A failure that a test asked for."""

    retryable = True

    def __init__(self, seed: int) -> None:
        super().__init__(f"injected by fail_randomly(seed={seed}). Use the same seed to see it again.", seed=seed)
