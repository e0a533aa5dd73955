"""What a hard cap takes unread is counted for each group, and told on the driver."""

import logging
from typing import Any

import pytest

from millstream.spark.errors import TaskUnheard
from millstream.spark.fan_out import undelivered
from millstream.spark.writer import Written, told_to_driver


def look(added: int, length: int) -> dict[bytes, int]:
    return {b"entries-added": added, b"length": length}


def group(read: int | None, lag: int | None = None, name: bytes = b"g") -> dict[bytes, Any]:
    return {b"name": name, b"entries-read": read, b"lag": lag}


def test_only_what_a_group_had_not_read_counts():
    slow, quick = group(40, name=b"slow"), group(90, name=b"quick")
    assert undelivered(look(100, 100), [slow, quick], look(100, 30)) == {b"slow": 30}
    assert undelivered(look(100, 100), [slow, quick], look(100, 5)) == {b"slow": 55, b"quick": 5}
    assert undelivered(look(100, 100), [group(80)], look(100, 30)) == {}
    assert undelivered(look(100, 50), [group(10)], look(100, 30)) == {b"g": 20}
    assert undelivered(look(100, 100), [], look(100, 30)) == {}


def test_where_a_group_has_not_counted_its_lag_tells_and_without_it_nobody_knows():
    assert undelivered(look(100, 100), [group(None, lag=60)], look(100, 30)) == {b"g": 30}
    assert undelivered(look(100, 100), [group(None)], look(100, 30)) == {}


def test_the_driver_tells_what_all_tasks_dropped(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "millstream.spark"):
        told_to_driver([Written(0, 10, 10, 0, 4), Written(1, 10, 7, 3, 5)], "batch 7")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "batch 7: 3 rows were there already and were not added again",
        "batch 7: the hard cap (maxlen, minid) took 9 entries before a group had read them",
    ]


def test_a_write_is_not_committed_while_a_task_has_not_said_what_it_wrote():
    with pytest.raises(TaskUnheard, match="1 task"):
        told_to_driver([Written(0, 10, 10, 0, 0), None], "batch 7")
