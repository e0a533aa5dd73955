"""Unread entries that a hard cap removes are counted for each group and logged on the driver."""

import logging
from typing import Any

import pytest

from millstream.spark.errors import MissingCommitMessage
from millstream.spark.fan_out import undelivered
from millstream.spark.writer import Written, commit_results


def stream_info(added: int, length: int) -> dict[bytes, int]:
    return {b"entries-added": added, b"length": length}


def group(read: int | None, lag: int | None = None, name: bytes = b"g") -> dict[bytes, Any]:
    return {b"name": name, b"entries-read": read, b"lag": lag}


def test_only_unread_entries_are_counted_as_undelivered():
    slow, quick = group(40, name=b"slow"), group(90, name=b"quick")
    assert undelivered(stream_info(100, 100), [slow, quick], stream_info(100, 30)) == {b"slow": 30}
    assert undelivered(stream_info(100, 100), [slow, quick], stream_info(100, 5)) == {b"slow": 55, b"quick": 5}
    assert undelivered(stream_info(100, 100), [group(80)], stream_info(100, 30)) == {}
    assert undelivered(stream_info(100, 50), [group(10)], stream_info(100, 30)) == {b"g": 20}
    assert undelivered(stream_info(100, 100), [], stream_info(100, 30)) == {}


def test_undelivered_entries_of_a_group_without_a_count_follow_from_its_lag():
    assert undelivered(stream_info(100, 100), [group(None, lag=60)], stream_info(100, 30)) == {b"g": 30}
    assert undelivered(stream_info(100, 100), [group(None)], stream_info(100, 30)) == {}


def test_driver_logs_skipped_and_dropped_rows_of_all_tasks(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "millstream.spark"):
        commit_results([Written(0, 10, 10, 0, 4), Written(1, 10, 7, 3, 5)], "batch 7")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "batch 7: 3 rows were already stored and were not added again",
        "batch 7: the hard cap (maxlen, minid) removed 9 entries before a group read them",
    ]


def test_write_is_not_committed_if_a_commit_message_is_missing():
    with pytest.raises(MissingCommitMessage, match="1 task"):
        commit_results([Written(0, 10, 10, 0, 0), None], "batch 7")
