"""Backoff of retries, permanent errors, and stops between batches."""

from __future__ import annotations

import threading

import pytest

from millstream.errors import AuthenticationFailed, BrokerUnavailable, MillstreamError, OutOfMemory
from millstream.pipelines.errors import StopRequested, is_disk_full, is_fatal, is_source_fault, is_transient, short
from millstream.pipelines.run_context import Gate
from millstream.pipelines.spec.pipeline import RetrySettings
from millstream.testing import wait_until

SETTINGS = RetrySettings.model_validate(
    {"initial": "100ms", "max": "1s", "multiplier": 2, "jitter": 0.2, "deadline": "5s"}
)


def test_waits_double_up_to_the_maximum_with_jitter_around_them() -> None:
    assert [SETTINGS.backoff.delay_ms(n, 0.5) for n in range(1, 7)] == [100, 200, 400, 800, 1000, 1000]
    assert (SETTINGS.backoff.delay_ms(1, 0.0), SETTINGS.backoff.delay_ms(10_000, 0.999)) == (80, 1200)


def test_retries_end_at_the_deadline() -> None:
    assert (SETTINGS.over(5000), SETTINGS.over(5001)) == (False, True)
    assert not RetrySettings(deadline="none").over(10**15)


def test_error_of_an_attempt_is_attributed_to_source_or_sink() -> None:
    reading = (
        'Traceback:\n  File "/x/millstream/spark/reader.py", line 9, in read\nmillstream.errors.BrokerUnavailable: no'
    )
    writing = (
        'Traceback:\n  File "/x/millstream/spark/writer.py", line 9, in write\nmillstream.errors.BrokerUnavailable: no'
    )
    assert is_source_fault(RuntimeError(reading))
    assert not is_source_fault(RuntimeError(writing))
    assert is_transient(RuntimeError(reading))
    assert is_transient(
        RuntimeError("[STREAM_FAILED] Query [id = 1] terminated: Python worker failed to connect back.")
    )
    assert not is_transient(RuntimeError("... millstream.spark.errors.DataLost: 3 entries ..."))
    assert not is_transient(RuntimeError("an unexpected error"))


def test_full_disk_is_recognized_in_the_error_of_a_task() -> None:
    assert is_disk_full(OSError(28, "No space left on device"))
    assert is_disk_full(RuntimeError("Job aborted ... java.io.IOException: No space left on device"))
    assert not is_disk_full(OSError(5, "Input/output error"))


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (BrokerUnavailable("gone"), False),
        (OutOfMemory("full"), False),
        (AuthenticationFailed("no"), True),
        (RuntimeError("... millstream.errors.AuthenticationFailed: WRONGPASS ..."), True),
        (RuntimeError("... millstream.errors.NonDeterministicReplay: other rows ..."), True),
        (RuntimeError("... millstream.errors.OutOfMemory: OOM ..."), False),
        (RuntimeError("Connection refused"), False),
        (RuntimeError("AnalysisException: no such column"), True),
        (RuntimeError("AnalysisException: ... millstream.errors.BrokerUnavailable: no answer"), False),
    ],
)
def test_permanent_errors(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) is fatal


def test_an_error_from_a_task_in_one_line() -> None:
    trace = "Traceback (most recent call last):\n  File x\nmillstream.errors.OutOfMemory: OOM command"
    text = f"Job aborted\n{trace}\n\n\tat org.x"
    assert short(RuntimeError(text)) == "OutOfMemory: OOM command"
    assert short(MillstreamError("plain\nmore")) == "plain"
    query = "\n=== Streaming Query ===\nIdentifier: shop [id = 1]\nCurrent State: ACTIVE"
    assert short(RuntimeError(text + query)) == "OutOfMemory: OOM command"


def test_exception_of_the_jvm_in_one_line() -> None:
    refused = "java.net.ConnectException: Call From a/127.0.0.1 to b:8020 failed on connection exception"
    text = f"An error occurred while calling o2159.start.\n: {refused}\n\tat java.base/x"
    assert short(RuntimeError(text)) == refused.removeprefix("java.net.")


def test_batch_after_closing_is_refused() -> None:
    gate = Gate()
    with gate.batch(1):
        pass
    assert gate.close()
    with pytest.raises(StopRequested), gate.batch(2):
        pass
    assert gate.last_done == 1


def test_closing_waits_for_the_batch_inside() -> None:
    gate, entered, leave, closed = Gate(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with gate.batch(5):
            entered.set()
            leave.wait(60)

    def close() -> None:
        gate.close()
        closed.set()

    threads = [threading.Thread(target=work), threading.Thread(target=close)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    wait_until(gate.closing.is_set)
    assert not closed.is_set()
    leave.set()
    assert closed.wait(60)
    for thread in threads:
        thread.join()
    assert gate.last_done == 5


def test_failed_batch_is_not_counted_as_done() -> None:
    gate = Gate()
    with pytest.raises(ValueError, match="no"), gate.batch(1):
        raise ValueError("no")
    assert gate.last_done is None
    assert gate.close(0)
