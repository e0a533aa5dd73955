"""Errors of messages, in addition to those of the broker, and errors that middleware raises in place of a handler."""

from __future__ import annotations

import math
from typing import ClassVar

from millstream.errors import InvalidArgument, MillstreamError

__all__ = ["CircuitOpen", "HandlerCrashed", "HandlerTimedOut", "InjectedFailure"]


class Undecodable(MillstreamError):
    """The codec cannot read an entry. ``reason`` says what is missing or broken; the dead letter has it, too."""

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Choose the codec that the producer writes with.", reason=reason)


class AlreadySettled(MillstreamError):
    """A message was acknowledged, nacked or rejected twice. ``first`` names what it was settled with."""

    first: str

    def __init__(self, uuid: str, first: str) -> None:
        super().__init__(
            f"message {uuid} was settled already ({first}). Settle each delivery once.", uuid=uuid, first=first
        )


class NothingToSettle(MillstreamError):
    """A message without a group was nacked or rejected. It is not pending, so it cannot be redelivered."""

    def __init__(self, uuid: str, wanted: str) -> None:
        super().__init__(
            f"message {uuid} came without a group, so there is nothing to {wanted}. "
            "Subscribe with a group if messages must be redelivered.",
            uuid=uuid,
            wanted=wanted,
        )


class TooLateToSettle(MillstreamError):
    """The subscription that delivered the message has ended and has returned it: it will be delivered again."""

    def __init__(self, uuid: str) -> None:
        super().__init__(
            f"message {uuid} was returned when its subscription was closed, and will be delivered again. "
            "Settle before closing, or raise close_timeout_ms.",
            uuid=uuid,
        )


class AlreadySubscribed(MillstreamError):
    """A subscriber of this process reads the topic already, under the same group and consumer."""

    def __init__(self, topic: str, group: str, consumer: str) -> None:
        super().__init__(
            f"consumer {consumer!r} of group {group!r} reads {topic!r} already. "
            "Use a second Subscriber with another consumer name, or raise max_in_flight.",
            topic=topic,
            group=group,
            consumer=consumer,
        )


class DeliveriesExhausted(MillstreamError):
    """No handler settled this message: each time the process ended, was paused, or had a blocked event loop.

    ``deliveries`` counts the starts."""

    deliveries: int

    def __init__(self, deliveries: int) -> None:
        super().__init__(
            f"{deliveries} handlers were started on this message and none of them settled it. The process ended, or it "
            "was paused or without its server for longer than claim_min_idle_ms (for a partition: its lease), or a "
            "blocking call in an async handler held its event loop for more than five minutes (the log then says that "
            "the event loop is blocked). Fix that, then replay the message from the dead letters.",
            deliveries=deliveries,
        )


class PublisherClosed(MillstreamError):
    """The publisher was closed and takes no more messages."""


class Rejected(MillstreamError):
    """Raised by a handler: this message can never be handled. It is dead-lettered at once, whatever the ack policy."""

    retryable: ClassVar[bool] = False
    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(reason, reason=reason)


class CannotUnmarshal(Rejected):
    """The payload is not a body that the handler accepts. Dead-lettered at once, because a retry cannot help.

    ``advice`` replaces the general advice of the error message."""

    def __init__(self, name: str, why: str, advice: str | None = None) -> None:
        super().__init__(f"not a valid {name}: {why}. {advice or _FIX_EITHER_SIDE}")
        self.name = name


_FIX_EITHER_SIDE = (
    "A replay sends the same payload again: either make the handler accept it and "
    "replay the dead letter, or fix the producer, publish a corrected message and delete the dead letter."
)


class RetryLater(MillstreamError):
    """Raised by a handler: not now. The message is retried after ``delay_ms``; None: after the backoff.

    ``charged=False``: this delivery does not count towards ``max_deliveries``, because the message did not cause the
    failure (a service that it needs is unavailable). It is retried as long as the handler raises this.
    """

    retryable: ClassVar[bool] = True
    delay_ms: int | None
    charged: bool

    def __init__(
        self, reason: str = "asked for a later retry", *, delay_ms: int | None = None, charged: bool = True
    ) -> None:
        super().__init__(reason, delay_ms=check_delay(delay_ms), charged=charged)


class HandlerCancelled(MillstreamError):
    """A handler ended because a task that it awaited was cancelled, although the handler itself was not."""

    retryable: ClassVar[bool] = True

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"cancelled from inside: {error!r}. Catch CancelledError where the handler waits for a task.")


class HandlerCrashed(MillstreamError):
    """A handler raised something that is not an Exception, such as SystemExit. ``kind`` names it."""

    kind: str

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the handler raised {type(error).__name__}({error}), which is meant to end a program. "
            "Raise an Exception from handlers instead.",
            kind=type(error).__name__,
        )


def check_delay(delay_ms: int | None) -> int | None:
    """Raises InvalidArgument for an invalid delay: raised later, it would leave the message without an outcome."""
    if delay_ms is not None and (type(delay_ms) is not int or not 0 <= delay_ms < 2**53):
        raise InvalidArgument("delay_ms", delay_ms, "a whole number of milliseconds that is not negative, or None")
    return delay_ms


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

    The message is retried then, and the delivery is not counted.
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
