"""Only a committed write restricts the rows of a replay's tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BlockingBroker, open_blocking_broker
from millstream.errors import NonDeterministicReplay
from millstream.spark.delivery import ExactlyOnce, WriteIdentity
from millstream.spark.entries import Piece
from millstream.spark.sink_options import sink_options
from millstream.spark.task_record import RowsGiven, TaskRecord, WrittenPosition, record_tasks

POSITION = WrittenPosition("out", "job/sink", 1)
WEEK_MS = 7 * 86_400_000


@pytest.fixture
def broker() -> Iterator[BlockingBroker]:
    with open_blocking_broker("local://") as opened:
        yield opened


def task(broker: BlockingBroker, rows: range, partition: int = 0) -> list[RowsGiven]:
    options = sink_options({"url": "redis://127.0.0.1:1", "stream": "out"}, streaming=True)
    delivery = ExactlyOnce(broker, options, WriteIdentity("job", 1, "sink", partition))
    delivery.write(Piece("out", [[b"event", b"%d" % row] for row in rows], None))
    return delivery.finish()


def test_task_whose_input_ended_early_is_repeated_with_all_its_rows(broker):
    task(broker, range(3))  # the task in front failed: the input ended without an error
    assert task(broker, range(10)) == [RowsGiven(POSITION, 10)]
    assert broker.xlen("out") == 10


def test_committed_record_refuses_a_task_that_brings_more_rows(broker):
    task(broker, range(3))
    record_tasks(broker, {POSITION: {0: 3}}, 2, WEEK_MS)
    with pytest.raises(NonDeterministicReplay):
        task(broker, range(10))
    with pytest.raises(NonDeterministicReplay):
        task(broker, range(1), partition=1)  # it had no rows
    with pytest.raises(NonDeterministicReplay):
        TaskRecord(broker, POSITION, 2)
    assert broker.xlen("out") == 3


@pytest.mark.parametrize("value", [{0: 3}, {0: 3, 1: 1}])
def test_commit_refuses_rows_that_an_uncommitted_attempt_stored_for_another_cut(broker, value):
    task(broker, range(3))
    task(broker, range(3, 5), partition=1)
    with pytest.raises(NonDeterministicReplay):
        record_tasks(broker, {POSITION: value}, 2, WEEK_MS)


def test_commit_refuses_rows_of_a_task_beyond_the_number_of_tasks(broker):
    task(broker, range(3))
    task(broker, range(3, 5), partition=1)
    with pytest.raises(NonDeterministicReplay):
        record_tasks(broker, {POSITION: {0: 3}}, 1, WEEK_MS)
