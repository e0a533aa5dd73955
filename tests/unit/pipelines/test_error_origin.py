"""Every error appears in a sink's attempt: which part caused it, and that the sink's own errors stay the sink's."""

from __future__ import annotations

import logging
import traceback

import pytest
from specs import planned

from millstream.errors import MillstreamError
from millstream.pipelines.errors import ErrorOrigin, ProcessorFailed, is_fatal, origin_of, without_values
from millstream.pipelines.plan import Placed
from millstream.pipelines.run_context import RunContext, SinkRetry

QUERY = "SELECT id, op,\n  1 / n AS share\nFROM events"
PLAN = planned(
    processors=[
        {"type": "sql", "id": "first", "query": "SELECT * FROM events"},
        {"type": "sql", "id": "shares", "query": QUERY},
    ]
)
PLACED: tuple[Placed, ...] = (*PLAN.streaming, *PLAN.per_batch)
ZERO = (
    "Job aborted: Lost task 0.0: org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero. Use "
    "`try_divide`. SQLSTATE: 22012\n== SQL (line 2, position 3) ==\n  1 / n AS share\n  ^^^^^\n\n\tat org.apache.spark"
)
BARE = "[CAST_INVALID_INPUT] The value 'x' cannot be cast. SQLSTATE: 22018\n== DataFrame ==\n\"cast\" was called from\n"


def test_quoted_query_identifies_its_processor() -> None:
    result = origin_of(RuntimeError(ZERO), PLACED, sink_involved=True)
    assert result == ErrorOrigin(
        "'shares' (sql)", "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`. SQLSTATE: 22012"
    )


def test_unattributed_data_error_is_the_sinks_if_one_was_involved() -> None:
    assert origin_of(RuntimeError(BARE), PLACED, sink_involved=True) is None
    assert is_fatal(RuntimeError(BARE))
    result = origin_of(RuntimeError(BARE), PLACED, sink_involved=False)
    assert result is not None
    assert result.processor == "(one of 'first' (sql), 'shares' (sql))"
    assert origin_of(RuntimeError(BARE), (), sink_involved=False) is None


def test_error_of_a_python_function_names_its_processor() -> None:
    quoted = ProcessorFailed("'own' (python)", "ValueError: no.")
    trace = f"Traceback:\nmillstream.pipelines.errors.ProcessorFailed: {quoted}"
    assert origin_of(RuntimeError(trace), PLACED, sink_involved=True) == ErrorOrigin("'own' (python)", "ValueError: no")


@pytest.mark.parametrize(
    "text",
    [
        "Connection refused",
        "[WRITING_JOB_ABORTED] Writing job aborted. SQLSTATE: 40000",
        "[TASK_FAILED] millstream.errors.BrokerUnavailable: no answer. SQLSTATE: 38000",
    ],
)
def test_transient_error_has_no_origin(text: str) -> None:
    assert origin_of(RuntimeError(text), PLACED, sink_involved=False) is None
    assert not is_fatal(RuntimeError(text))


@pytest.mark.parametrize("text", [BARE, ZERO.replace("Division by zero.", "The value 'x'.")])
def test_error_of_a_pipeline_with_a_mask_quotes_no_value(text: str, caplog: pytest.LogCaptureFixture) -> None:
    masking = planned(
        processors=[
            {"type": "sql", "id": "shares", "query": QUERY},
            {"type": "mask", "fields": {"email": "hash"}},
        ]
    )
    events: list[object] = []
    retry = SinkRetry(masking, RunContext("app", observer=lambda name, **values: events.append(values)))

    def attempt() -> None:
        raise RuntimeError(text)

    with caplog.at_level(logging.DEBUG), pytest.raises(MillstreamError) as caught:
        retry.until_taken("main", lambda: None, attempt)
    output = "".join(traceback.format_exception(caught.value)).replace(__file__, "")
    assert "The value 'x'" not in f"{output}{events}{caplog.text}"
    assert "SQLSTATE" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[CAST_INVALID_INPUT] The value 'canary' of the type is malformed. SQLSTATE: 22018",
        "[CANNOT_PARSE_TIMESTAMP] Text 'can\ncanary' could not be parsed. SQLSTATE: 22007\n== SQL ==\ncanary",
        '[INVALID_VARIANT_CAST] The variant value `"canary"` cannot be cast. SQLSTATE: 22023',
        "[FAILED_EXECUTE_UDF] canary. SQLSTATE: 39000",
        "An error occurred.\n: java.lang.NumberFormatException: For input string: canary\n\tat org.apache",
        "Traceback (most recent call last):\nValueError: canary",
        "canary",
    ],
)
def test_error_of_a_masking_pipeline_quotes_no_value(text: str) -> None:
    assert "canary" not in without_values(RuntimeError(text))
    assert without_values(RuntimeError(text))


def test_error_of_a_masking_pipeline_still_names_our_own_errors() -> None:
    text = "[TASK_FAILED] x\nmillstream.errors.BrokerUnavailable: no answer from h:1\n SQLSTATE: 38000"
    assert without_values(RuntimeError(text)) == "BrokerUnavailable: no answer from h:1"
    assert without_values(ProcessorFailed("'own' (python)", "ValueError")).startswith("processor 'own'")
