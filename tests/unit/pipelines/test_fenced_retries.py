"""Retries of a sink under the lease of a run: a lost lease ends them, a fenced write of the holder is repeated."""

from __future__ import annotations

import pytest
from specs import planned

from millstream.errors import BrokerUnavailable
from millstream.pipelines.errors import LeaseLost, SinkFailed
from millstream.pipelines.run_context import RunContext, SinkRetry

RETRY = {"initial": "1ms", "max": "2ms", "deadline": "2s"}


class FakeLease:
    """The part of ``RunLease`` that retries use; ``answers`` are the results of the next confirmations."""

    sink = "main"

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.lost: LeaseLost | None = None

    def confirm(self) -> None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, LeaseLost):
            self.lost = answer
        if answer is not None:
            raise answer

    def check(self) -> LeaseLost | None:
        try:
            self.confirm()
        except Exception:
            pass
        return self.lost

    def require(self) -> None:
        if self.lost is not None:
            raise self.lost


LOST = LeaseLost("orders", "other-host", "7", "an hour ago")
FENCED = RuntimeError("... millstream.errors.StaleOwner: Nothing was written ...")


def retry_under(lease: FakeLease) -> tuple[SinkRetry, RunContext]:
    context = RunContext("orders-1", lease=lease)  # type: ignore[arg-type]
    return SinkRetry(planned(retry=RETRY), context), context


def test_fenced_write_ends_the_retries_if_another_process_took_over() -> None:
    lease = FakeLease(LOST)
    retry, context = retry_under(lease)
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise FENCED

    with pytest.raises(LeaseLost):
        retry.until_taken("main", lambda: None, attempt)
    assert len(attempts) == 1
    assert context.troubles == {}, "the sink is not at fault"
    with pytest.raises(LeaseLost):
        retry.until_taken("main", lambda: None, attempt)
    assert len(attempts) == 1, "without the lease nothing is attempted"


def test_fenced_write_is_repeated_if_this_process_still_holds_the_lease() -> None:
    retry, _ = retry_under(FakeLease())
    errors: list[Exception] = [FENCED]

    def attempt() -> None:
        if errors:
            raise errors.pop()

    assert retry.until_taken("main", lambda: None, attempt) == 2


def test_commit_waits_until_redis_confirms_the_lease() -> None:
    lease = FakeLease(BrokerUnavailable("away"), BrokerUnavailable("away"))
    retry, context = retry_under(lease)
    retry.verify_lease()
    assert lease.answers == []
    assert context.troubles == {}


def test_commit_is_refused_after_the_deadline_or_a_take_over() -> None:
    retry, _ = retry_under(FakeLease(*[BrokerUnavailable("away")] * 100_000))
    with pytest.raises(SinkFailed):
        retry.verify_lease()
    retry, _ = retry_under(FakeLease(BrokerUnavailable("away"), LOST))
    with pytest.raises(LeaseLost):
        retry.verify_lease()
