"""Errors come out of a sink's attempt whoever made them: who is to blame, and that the sink's own are left to it."""

from __future__ import annotations

import pytest
from specs import planned

from millstream.pipelines.errors import ErrorOrigin, ProcessorFailed, is_fatal, origin_of
from millstream.pipelines.plan import Placed

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


def test_the_query_that_spark_quotes_is_to_blame() -> None:
    found = origin_of(RuntimeError(ZERO), PLACED, sink_involved=True)
    assert found == ErrorOrigin(
        "'shares' (sql)", "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`. SQLSTATE: 22012"
    )


def test_data_that_nobody_quotes_is_a_sink_s_where_one_was_involved() -> None:
    assert origin_of(RuntimeError(BARE), PLACED, sink_involved=True) is None
    assert is_fatal(RuntimeError(BARE))
    found = origin_of(RuntimeError(BARE), PLACED, sink_involved=False)
    assert found is not None
    assert found.processor == "(one of 'first' (sql), 'shares' (sql))"
    assert origin_of(RuntimeError(BARE), (), sink_involved=False) is None


def test_a_function_in_a_task_names_itself() -> None:
    told = ProcessorFailed("'own' (python)", "ValueError: no.")
    trace = f"Traceback:\nmillstream.pipelines.errors.ProcessorFailed: {told}"
    assert origin_of(RuntimeError(trace), PLACED, sink_involved=True) == ErrorOrigin("'own' (python)", "ValueError: no")


@pytest.mark.parametrize(
    "text",
    [
        "Connection refused",
        "[WRITING_JOB_ABORTED] Writing job aborted. SQLSTATE: 40000",
        "[TASK_FAILED] millstream.errors.BrokerUnavailable: no answer. SQLSTATE: 38000",
    ],
)
def test_what_may_pass_is_nobody_s_fault(text: str) -> None:
    assert origin_of(RuntimeError(text), PLACED, sink_involved=False) is None
    assert not is_fatal(RuntimeError(text))
