"""What was read ahead: where batches may end, what survives a crash, what is given up."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millstream.cdc.decoding import lane_of
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.segments import read_segment
from millstream.cdc.snapshot import Snapshot, widened
from millstream.cdc.spool import LogSpool
from millstream.errors import InvalidArgument
from millstream.testing import wait_until


def transaction(spool: LogSpool, end: int, changes: int = 1) -> None:
    spool.add(b"B", change=False)
    for _ in range(changes):
        spool.add(b"change", change=True)
    spool.add(b"C", change=False)
    spool.commit(end)


def filled(directory: Path, ends: list[int], changes: int = 1, max_bytes: int = 1 << 20) -> LogSpool:
    spool = LogSpool(directory, 100, max_bytes)
    for end in ends:
        transaction(spool, end, changes)
    return spool


def test_a_batch_ends_at_a_commit_within_its_limits_and_holds_one_transaction_at_least(tmp_path: Path) -> None:
    spool = filled(tmp_path, [110, 120], changes=3)
    spool.seal()
    transaction(spool, 130, 3)
    transaction(spool, 140, 50)
    spool.seal()
    assert spool.end(100, 1000, None, None) == 140
    assert spool.end(100, 1000, 3, None) == 110
    assert spool.end(100, 1000, 8, None) == 120
    assert spool.end(100, 1000, 9, None) == 130
    assert spool.end(130, 1000, 9, None) == 140, "larger than the limit, and still one batch"
    assert spool.end(100, 125, None, None) == 120
    assert spool.end(140, 1000, None, None) is None
    assert spool.end(100, 1000, None, 25) == 110
    assert (spool.changes(100, 140), spool.changes(110, 130), spool.ahead(120)) == (59, 6, 53)


def test_what_is_sealed_survives_and_an_open_transaction_is_read_again(tmp_path: Path) -> None:
    spool = filled(tmp_path, [110])
    spool.add(b"B", change=False)
    spool.part({"lsn": 1, "ts_ms": 0, "xid": 1, "number": 0})
    assert [path.name.split("-")[2] for path in sorted(tmp_path.iterdir())] == ["open.seg"]
    spool.add(b"change", change=True)
    spool.commit(120)
    spool.seal()
    transaction(spool, 130)
    spool.seal()
    spool.add(b"B", change=False)
    spool.part(None)
    again = LogSpool(tmp_path, 100, 1 << 20)
    assert again.position == 130
    assert again.end(100, 1000, None, None) == 130
    assert len(list(tmp_path.iterdir())) == 3, "the part of a transaction without its end is gone"
    [first, _] = again.stretches(100, 130)
    assert len(first.files) == 2
    assert read_segment(first.files[1]).facts["open"] == {"lsn": 1, "ts_ms": 0, "xid": 1, "number": 0}


def test_behind_a_gap_everything_is_read_again(tmp_path: Path) -> None:
    spool = LogSpool(tmp_path, 100, 1 << 20)
    for end in (110, 120, 130):
        transaction(spool, end)
        spool.seal()
    sorted(tmp_path.iterdir())[1].unlink()
    again = LogSpool(tmp_path, 100, 1 << 20)
    assert again.position == 110
    assert len(list(tmp_path.iterdir())) == 1


def test_who_plans_gets_a_turn_though_the_session_reads_on_without_a_pause(tmp_path: Path) -> None:
    spool = LogSpool(tmp_path, 100, 1 << 20)
    turns: list[str] = []

    def plan() -> None:
        with spool.lock:
            turns.append("planned")

    planner = threading.Thread(target=plan)
    with spool.lock:
        planner.start()
        wait_until(lambda: spool.lock._lock.waiting, what="the planner's wish")
    for _ in range(3):
        with spool.lock:
            turns.append("read")
    planner.join()
    assert turns == ["planned", "read", "read", "read"]


def test_a_damaged_file_is_a_gap(tmp_path: Path) -> None:
    spool = filled(tmp_path, [110])
    spool.seal()
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert LogSpool(tmp_path, 100, 1 << 20).position == 100
    assert list(tmp_path.iterdir()) == []


def test_a_finished_batch_makes_room(tmp_path: Path) -> None:
    spool = filled(tmp_path, [110, 120], changes=10, max_bytes=100)
    assert spool.full()
    spool.seal()
    with spool.lock:
        spool.forget(115)
    assert spool.full(), "a file goes when all of it is finished"
    with spool.lock:
        spool.forget(120)
    assert not spool.full()
    assert list(tmp_path.iterdir()) == []
    spool.needed = 500
    transaction(spool, 130, 100)
    assert not spool.full(), "a batch that is replayed is read whatever it takes"


def test_a_table_that_looks_different_begins_another_file(tmp_path: Path) -> None:
    spool = LogSpool(tmp_path, 100, 1 << 20)
    spool.describe(7, {"columns": 1}, None)
    transaction(spool, 110)
    spool.add(b"B", change=False)
    spool.add(b"change", change=True)
    spool.describe(7, {"columns": 2}, {"lsn": 5, "ts_ms": 0, "xid": 1, "number": 1})
    spool.add(b"change", change=True)
    spool.commit(120)
    spool.seal()
    looks = [read_segment(path).facts["relations"]["7"]["columns"] for path in sorted(tmp_path.iterdir())]
    assert looks == [1, 1, 2]


def test_a_new_connection_begins_where_whole_transactions_end(tmp_path: Path) -> None:
    spool = filled(tmp_path, [110])
    spool.add(b"B", change=False)
    spool.add(b"change", change=True)
    spool.restart()
    transaction(spool, 120)
    spool.seal()
    assert (spool.changes(100, 120), spool.position) == (2, 120)


def test_32_bits_of_a_transaction_are_widened_to_the_nearest() -> None:
    near = (3 << 32) + 5
    xids = np.array([4, 6, 0xFFFFFFFF, 5], dtype=np.int64)
    assert widened(xids, near).tolist() == [(3 << 32) + 4, (3 << 32) + 6, (2 << 32) + 0xFFFFFFFF, near]


def test_a_snapshot_saw_what_was_done_and_nothing_that_ran() -> None:
    snapshot = Snapshot.parse("100:110:103,105")
    saw = snapshot.saw(np.array([99, 100, 103, 104, 105, 109, 110, 111], dtype=np.int64))
    assert saw.tolist() == [True, True, False, True, False, True, False, False]
    assert Snapshot.parse("7:7:").running == ()


def test_a_key_takes_the_same_lane_in_every_slice_and_all_lanes_are_used() -> None:
    keys = pa.array([f'{{"id":{number}}}' for number in range(1000)])
    lanes = lane_of(keys, 4)
    assert lane_of(keys.slice(500), 4).tolist() == lanes[500:].tolist()
    assert np.bincount(lanes).min() > 150
    assert lane_of(pa.array(["", "a", ""]), 3).tolist()[0] == lane_of(pa.array([""]), 3).tolist()[0]


def test_an_offset_of_another_release_is_refused() -> None:
    offset = ChangeOffset("server/db", 7, 1, 2, 3)
    assert ChangeOffset.from_json(offset.to_json()) == offset
    with pytest.raises(InvalidArgument):
        ChangeOffset.from_json({**offset.to_json(), "version": 2})
