from __future__ import annotations

import pickle

import pytest

from millstream.errors import InvalidArgument
from millstream.messaging import (
    AckPolicy,
    AlreadySettled,
    DeadLetterOutcome,
    DeliveriesExhausted,
    Rejected,
    Retry,
    RetryLater,
)
from millstream.messaging.errors import NothingToSettle, Undecodable
from millstream.messaging.outcome import ACKED, after_error, limit_deliveries

ERROR = ValueError("x")


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        (AckPolicy.ACK_FIRST, ACKED),
        (AckPolicy.ACK, ACKED),
        (AckPolicy.REJECT_ON_ERROR, DeadLetterOutcome(ERROR)),
        (AckPolicy.NACK_ON_ERROR, Retry(None, ERROR)),
        (AckPolicy.MANUAL, Retry(None, ERROR)),
    ],
)
def test_an_error_under_each_policy(policy: AckPolicy, outcome: object) -> None:
    assert after_error(policy, ERROR) == outcome


@pytest.mark.parametrize("policy", list(AckPolicy))
def test_rejected_and_retry_later_mean_the_same_under_every_policy(policy: AckPolicy) -> None:
    rejected, later = Rejected("never"), RetryLater(delay_ms=9)

    assert after_error(policy, rejected) == DeadLetterOutcome(rejected)
    assert after_error(policy, later) == Retry(9, later)


def test_last_retry_is_a_dead_letter() -> None:
    assert limit_deliveries(Retry(5, ERROR), 4, 5) == Retry(5, ERROR)
    assert limit_deliveries(Retry(5, ERROR), 5, 5) == DeadLetterOutcome(ERROR)
    assert isinstance(limit_deliveries(Retry(5), 6, 5), DeadLetterOutcome)
    assert limit_deliveries(ACKED, 9, 5) is ACKED


def test_policies_are_known_by_name() -> None:
    assert AckPolicy.parse("nack_on_error") is AckPolicy.parse("NACK_ON_ERROR") is AckPolicy.NACK_ON_ERROR
    with pytest.raises(InvalidArgument, match="REJECT_ON_ERROR"):
        AckPolicy.parse("perhaps")


@pytest.mark.parametrize(
    "error",
    [
        AlreadySettled("u", "ack"),
        NothingToSettle("u", "retry"),
        DeliveriesExhausted(5),
        Undecodable("no payload"),
        Rejected("no"),
        RetryLater(delay_ms=3),
    ],
)
def test_errors_pickle_with_their_facts(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
