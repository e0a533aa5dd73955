"""The status of a pipeline: its lag, and the sinks that it waits for."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from specs import planned

from millstream.errors import AuthenticationFailed, BrokerUnavailable
from millstream.pipelines.errors import EventFailed, SinkFailed, SourceFailed, StopRequested
from millstream.pipelines.run_context import RunContext, SinkRetry
from millstream.pipelines.status import PipelineStatus, _line, _table, chosen, lag

OURS = json.dumps({"streams": {"a": {"id": "5-0", "added": 9, "lag": 4}, "b": {"id": "1-0", "added": 1, "lag": 0}}})


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([OURS], 4),
        ([json.loads(OURS)], 4),
        ([OURS, OURS], 8),
        ([json.dumps({"streams": {}})], 0),
        ([json.dumps({"streams": {"a": {"id": "5-0", "added": None, "lag": None}}})], None),
        ([OURS, json.dumps({"orders": {"0": 17}})], None),
        (["17"], None),
        ([json.dumps({"streams": 3})], None),
        (["no JSON"], None),
        ([None], None),
        ([], None),
    ],
)
def test_lag_is_reported_by_our_source_and_unknown_for_others(reports: list[Any], expected: int | None) -> None:
    assert lag(reports) == expected


def status(sinks: dict[str, str], **progress: Any) -> PipelineStatus:
    return PipelineStatus("orders", "acme", "running", None, 3, None, "/c", "ok", sinks, {}, progress)


def drawn(first: PipelineStatus) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(_table([first]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_lag_batch_time_and_sinks_are_shown() -> None:
    first = status({"a": "ok", "b": "retrying"}, rows=70, processed_rows_per_second=1234.5, lag=5678, batch_ms=90)
    head, row = drawn(first).splitlines()
    assert head.split() == ["pipeline", "state", "batch", "rows", "rows/s", "lag", "batch", "ms", "sinks"]
    assert row.split() == ["orders", "running", "3", "70", "1,234", "5,678", "90", "a", "ok,", "b", "retrying"]
    assert "lag 5,678, 90 ms, sinks: a ok, b retrying" in _line(first)


def test_unknown_values_are_shown_as_a_dash() -> None:
    assert drawn(status({"a": "ok"}, rows=1, lag=None)).splitlines()[1].split()[2:7] == ["3", "1", "-", "-", "-"]
    assert "lag" not in _line(status({})), "a line leaves out what is not known"


class Trial:
    """A sink that refuses for a while, and its status meanwhile."""

    def __init__(self, *errors: Exception, deadline: str = "60s") -> None:
        self.context = RunContext("app")
        self._left = list(errors)
        self.seen: list[str | None] = []
        plan = planned(retry={"initial": "1ms", "max": "1ms", "deadline": deadline})
        self._retry = SinkRetry(plan, self.context)

    def run(self) -> None:
        self._retry.until_taken("main", lambda: None, self._attempt)

    def _attempt(self) -> None:
        self.seen.append(self.context.troubles.get("main"))
        if self._left:
            raise self._left.pop(0)


def test_status_shows_a_sink_as_retrying() -> None:
    trial = Trial(BrokerUnavailable("gone"), BrokerUnavailable("gone"))
    trial.run()
    assert trial.seen == [None, "retrying", "retrying"]
    assert trial.context.troubles == {}


def test_failed_sink_stays_in_the_status() -> None:
    for trial in (Trial(AuthenticationFailed("no")), Trial(BrokerUnavailable("gone"), deadline="0ms")):
        with pytest.raises(SinkFailed):
            trial.run()
        assert trial.context.troubles == {"main": "failed"}
    stopped = Trial(BrokerUnavailable("gone"))
    stopped.context.stopping = threading.Event()
    stopped.context.stopping.set()
    with pytest.raises(StopRequested):
        stopped.run()
    assert stopped.context.troubles == {"main": "failed"}


def test_error_of_an_event_is_not_attributed_to_the_sink() -> None:
    trial = Trial(EventFailed("1", "source", "no JSON"))
    with pytest.raises(EventFailed):
        trial.run()
    assert trial.context.troubles == {}


def test_status_shows_the_same_record_in_words() -> None:
    from millstream.cli.pipeline_status import _labelled

    displayed = _labelled(asdict(status({"a": "ok", "b": "retrying"}, lag=4, batch_ms=None)))
    assert (displayed["lag"], displayed["sink b"], displayed["source"]) == (4, "retrying", "ok")
    assert "batch ms" not in displayed
    slot = {"name": "shop", "active": True, "held_bytes": 4096, "wal_status": "reserved", "unacknowledged_s": 3.0}
    displayed = _labelled(asdict(status({"a": "ok"}, slot=slot)))
    assert displayed["slot shop"] == "4,096 bytes held, reserved, acknowledged 3 s ago"
    displayed = _labelled(asdict(status({"a": "ok"}, slot={**slot, "unacknowledged_s": None})))
    assert displayed["slot shop"] == "4,096 bytes held, reserved"


def test_rows_are_counted_once_however_often_spark_reads_them() -> None:
    """100 entries and two sinks showed 200."""
    source = SimpleNamespace(inputRowsPerSecond=400.0, latestOffset=OURS, endOffset="{}", metrics={})
    last = SimpleNamespace(
        batchId=7,
        numInputRows=200,
        inputRowsPerSecond=400.0,
        processedRowsPerSecond=100.0,
        durationMs={"triggerExecution": 2000},
        sources=[source],
        stateOperators=[],
    )
    reported = chosen(last, (7, 100))
    assert (reported["rows"], reported["input_rows_per_second"], reported["processed_rows_per_second"]) == (
        100,
        200.0,
        50.0,
    )
    assert chosen(last, (6, 100))["rows"] == 200, "another batch's count says nothing"


def test_read_error_is_not_attributed_to_a_sink() -> None:
    facts: list[str] = []
    where = 'Traceback:\n  File "/x/millstream/spark/reader.py", line 9, in read\n'
    trial = Trial(RuntimeError(where + "millstream.spark.errors.DataLost: 3 entries"))
    trial.context.observer = lambda name, **_: facts.append(name)
    with pytest.raises(SourceFailed, match="DataLost"):
        trial.run()
    assert facts == ["pipeline.source_error"]
    assert trial.context.troubles == {}


def test_without_a_deadline_a_sink_is_retried_without_limit() -> None:
    trial = Trial(*(BrokerUnavailable("gone") for _ in range(50)), deadline="none")
    trial.run()
    assert len(trial.seen) == 51
