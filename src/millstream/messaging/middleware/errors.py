"""What middleware raises in a handler's place."""

from __future__ import annotations

from millstream.errors import MillstreamError


class HandlerTimedOut(MillstreamError):
    """The handler was cancelled because it took longer than it may. ``after_s`` is the limit."""

    retryable = True
    after_s: float

    def __init__(self, after_s: float) -> None:
        super().__init__(
            f"the handler did not finish within {after_s:g} s. Raise the limit, or do less.", after_s=after_s
        )


class HandlerCrashed(MillstreamError):
    """The handler raised something that is not an Exception, such as SystemExit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the handler raised {type(error).__name__}({error}), which is meant to end a program. "
            "Raise an Exception from handlers instead.",
            kind=type(error).__name__,
        )


class CircuitOpen(MillstreamError):
    """The circuit breaker refused to start the handler. ``retry_after_s`` says when it will try again."""

    retryable = True
    retry_after_s: float

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            f"the circuit is open for another {retry_after_s:.1f} s. Look at why the handler failed before.",
            retry_after_s=retry_after_s,
        )


class InjectedFailure(MillstreamError):
    """A failure that a test asked for."""

    retryable = True

    def __init__(self, seed: int) -> None:
        super().__init__(f"injected by fail_randomly(seed={seed}). Use the same seed to see it again.", seed=seed)
