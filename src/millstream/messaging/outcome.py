"""The outcome of a delivered message: acknowledged, retried or dead-lettered. Pure.

The result or the error of a handler becomes an outcome, which the settler applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from millstream.errors import InvalidArgument
from millstream.messaging.errors import Rejected, RetryLater

if TYPE_CHECKING:
    from millstream.messaging.message import Message


@dataclass(frozen=True, slots=True)
class Ack:
    """Done. ``outputs`` are published in the same atomic step if the streams share a slot, otherwise before it."""

    outputs: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Retry:
    """Redelivered after ``delay_ms`` (None: the subscriber's backoff). ``error``: the cause, if known.

    Not ``charged``: this delivery does not count, because the message did not cause the failure.
    """

    delay_ms: int | None = None
    error: BaseException | None = None
    charged: bool = True


@dataclass(frozen=True, slots=True)
class DeadLetterOutcome:
    """Moved to the dead-letter stream, with the reason."""

    error: BaseException


Outcome = Ack | Retry | DeadLetterOutcome

ACKED = Ack()


class AckPolicy(Enum):
    """When a message that a handler received counts as done. The names are those that FastStream users know."""

    ACK_FIRST = "ack_first"
    """Before the handler starts: at most once."""
    ACK = "ack"
    """After the handler, whether it failed or not."""
    REJECT_ON_ERROR = "reject_on_error"
    """After success; a failure dead-letters the message at once."""
    NACK_ON_ERROR = "nack_on_error"
    """After success; a failed message is retried, until ``max_deliveries``. The default."""
    MANUAL = "manual"
    """Only when the handler calls ``ack``, ``nack`` or ``reject``."""

    @classmethod
    def parse(cls, value: AckPolicy | str) -> AckPolicy:
        """Takes the member, its name or its value; anything else is an InvalidArgument that lists the names."""
        if isinstance(value, cls):
            return value
        for member in cls:
            if isinstance(value, str) and value.lower() == member.value:
                return member
        raise InvalidArgument("ack_policy", value, ", ".join(member.name for member in cls))


def after_error(policy: AckPolicy, error: BaseException) -> Outcome:
    """What an error that left the handler means. ``Rejected`` and ``RetryLater`` mean the same under every policy."""
    if isinstance(error, Rejected):
        return DeadLetterOutcome(error)
    if isinstance(error, RetryLater):
        return Retry(error.delay_ms, error, error.charged)
    match policy:
        case AckPolicy.ACK | AckPolicy.ACK_FIRST:
            return ACKED
        case AckPolicy.REJECT_ON_ERROR:
            return DeadLetterOutcome(error)
        case AckPolicy.NACK_ON_ERROR | AckPolicy.MANUAL:
            # MANUAL too: a handler that raised has not settled its message, and no other code will.
            return Retry(None, error)


def limit_deliveries(outcome: Outcome, times_delivered: int, max_deliveries: int) -> Outcome:
    """Dead-letters a message whose retry would exceed the limit. A retry that is not charged never exceeds it."""
    if isinstance(outcome, Retry) and outcome.charged and times_delivered >= max_deliveries:
        return DeadLetterOutcome(
            outcome.error if outcome.error is not None else Rejected(f"nacked {times_delivered} times")
        )
    return outcome
