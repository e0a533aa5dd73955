"""The read-ahead log: where batches end, what survives a crash, and the helpers of snapshots and offsets."""

from __future__ import annotations

import errno
import threading
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millstream.cdc.decoding import partition_of
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.read_ahead import ReadAheadLog
from millstream.cdc.segments import read_segment, write_segment
from millstream.cdc.snapshot import Snapshot, widened
from millstream.errors import InvalidArgument
from millstream.testing import wait_until


def transaction(read_ahead: ReadAheadLog, end: int, changes: int = 1) -> None:
    read_ahead.add(b"B", change=False)
    for _ in range(changes):
        read_ahead.add(b"change", change=True)
    read_ahead.add(b"C", change=False)
    read_ahead.commit(end)


def filled(directory: Path, ends: list[int], changes: int = 1, max_bytes: int = 1 << 20) -> ReadAheadLog:
    read_ahead = ReadAheadLog(directory, 100, max_bytes)
    for end in ends:
        transaction(read_ahead, end, changes)
    return read_ahead


@pytest.mark.parametrize("failing", ["fsync", "link"])
def test_segment_that_cannot_be_written_leaves_no_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk its unfinished file would keep the space, and each further attempt would add one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"os.{failing}", full)
    with pytest.raises(OSError, match="No space left"):
        write_segment(tmp_path / "segment", b"body", array("I", [4]), {})
    assert list(tmp_path.iterdir()) == []


def test_batch_ends_at_a_commit_within_its_limits_with_at_least_one_transaction(tmp_path: Path) -> None:
    read_ahead = filled(tmp_path, [110, 120], changes=3)
    read_ahead.seal()
    transaction(read_ahead, 130, 3)
    transaction(read_ahead, 140, 50)
    read_ahead.seal()
    assert read_ahead.end(100, 1000, None, None) == 140
    assert read_ahead.end(100, 1000, 3, None) == 110
    assert read_ahead.end(100, 1000, 8, None) == 120
    assert read_ahead.end(100, 1000, 9, None) == 130
    assert read_ahead.end(130, 1000, 9, None) == 140, "a transaction beyond the limit is one batch"
    assert read_ahead.end(100, 125, None, None) == 120
    assert read_ahead.end(140, 1000, None, None) is None
    assert read_ahead.end(100, 1000, None, 25) == 110
    assert (read_ahead.changes(100, 140), read_ahead.changes(110, 130), read_ahead.ahead(120)) == (59, 6, 53)


def test_sealed_files_survive_a_restart_and_open_transaction_is_read_again(tmp_path: Path) -> None:
    read_ahead = filled(tmp_path, [110])
    read_ahead.add(b"B", change=False)
    read_ahead.part({"lsn": 1, "ts_ms": 0, "xid": 1, "number": 0})
    assert [path.name.split("-")[2] for path in sorted(tmp_path.iterdir())] == ["open.seg"]
    read_ahead.add(b"change", change=True)
    read_ahead.commit(120)
    read_ahead.seal()
    transaction(read_ahead, 130)
    read_ahead.seal()
    read_ahead.add(b"B", change=False)
    read_ahead.part(None)
    reopened = ReadAheadLog(tmp_path, 100, 1 << 20)
    assert reopened.position == 130
    assert reopened.end(100, 1000, None, None) == 130
    assert len(list(tmp_path.iterdir())) == 3, "the file of an incomplete transaction is removed"
    [first, _] = reopened.ranges(100, 130)
    assert len(first.files) == 2
    assert read_segment(first.files[1]).metadata["open"] == {"lsn": 1, "ts_ms": 0, "xid": 1, "number": 0}


def test_everything_after_a_gap_is_read_again(tmp_path: Path) -> None:
    read_ahead = ReadAheadLog(tmp_path, 100, 1 << 20)
    for end in (110, 120, 130):
        transaction(read_ahead, end)
        read_ahead.seal()
    sorted(tmp_path.iterdir())[1].unlink()
    reopened = ReadAheadLog(tmp_path, 100, 1 << 20)
    assert reopened.position == 110
    assert len(list(tmp_path.iterdir())) == 1


def test_planner_gets_the_lock_while_the_session_reads_without_pause(tmp_path: Path) -> None:
    read_ahead = ReadAheadLog(tmp_path, 100, 1 << 20)
    order: list[str] = []

    def plan() -> None:
        with read_ahead.lock:
            order.append("planned")

    planner = threading.Thread(target=plan)
    with read_ahead.lock:
        planner.start()
        wait_until(lambda: read_ahead.lock._lock.waiting, what="the planner's wish")
    for _ in range(3):
        with read_ahead.lock:
            order.append("read")
    planner.join()
    assert order == ["planned", "read", "read", "read"]


def test_damaged_file_is_a_gap(tmp_path: Path) -> None:
    read_ahead = filled(tmp_path, [110])
    read_ahead.seal()
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert ReadAheadLog(tmp_path, 100, 1 << 20).position == 100
    assert list(tmp_path.iterdir()) == []


def test_finished_batch_frees_capacity(tmp_path: Path) -> None:
    read_ahead = filled(tmp_path, [110, 120], changes=10, max_bytes=100)
    assert read_ahead.full()
    read_ahead.seal()
    with read_ahead.lock:
        read_ahead.forget(115)
    assert read_ahead.full(), "a file is removed when all of its transactions are finished"
    with read_ahead.lock:
        read_ahead.forget(120)
    assert not read_ahead.full()
    assert list(tmp_path.iterdir()) == []
    read_ahead.required_position = 500
    transaction(read_ahead, 130, 100)
    assert not read_ahead.full(), "a replayed batch is read even beyond the limit"


def test_changed_table_description_starts_a_new_file(tmp_path: Path) -> None:
    read_ahead = ReadAheadLog(tmp_path, 100, 1 << 20)
    read_ahead.describe(7, {"columns": 1}, None)
    transaction(read_ahead, 110)
    read_ahead.add(b"B", change=False)
    read_ahead.add(b"change", change=True)
    read_ahead.describe(7, {"columns": 2}, {"lsn": 5, "ts_ms": 0, "xid": 1, "number": 1})
    read_ahead.add(b"change", change=True)
    read_ahead.commit(120)
    read_ahead.seal()
    looks = [read_segment(path).metadata["relations"]["7"]["columns"] for path in sorted(tmp_path.iterdir())]
    assert looks == [1, 1, 2]


def test_new_connection_starts_after_the_last_complete_transaction(tmp_path: Path) -> None:
    read_ahead = filled(tmp_path, [110])
    read_ahead.add(b"B", change=False)
    read_ahead.add(b"change", change=True)
    read_ahead.restart()
    transaction(read_ahead, 120)
    read_ahead.seal()
    assert (read_ahead.changes(100, 120), read_ahead.position) == (2, 120)


def test_32_bit_transaction_id_becomes_the_nearest_64_bit_id() -> None:
    near = (3 << 32) + 5
    xids = np.array([4, 6, 0xFFFFFFFF, 5], dtype=np.int64)
    assert widened(xids, near).tolist() == [(3 << 32) + 4, (3 << 32) + 6, (2 << 32) + 0xFFFFFFFF, near]


def test_snapshot_includes_finished_and_excludes_running_transactions() -> None:
    snapshot = Snapshot.parse("100:110:103,105")
    sees = snapshot.sees(np.array([99, 100, 103, 104, 105, 109, 110, 111], dtype=np.int64))
    assert sees.tolist() == [True, True, False, True, False, True, False, False]
    assert Snapshot.parse("7:7:").running == ()


def test_key_has_the_same_partition_in_every_slice_and_all_partitions_are_used() -> None:
    keys = pa.array([f'{{"id":{number}}}' for number in range(1000)])
    partitions = partition_of(keys, 4)
    assert partition_of(keys.slice(500), 4).tolist() == partitions[500:].tolist()
    assert np.bincount(partitions).min() > 150
    assert partition_of(pa.array(["", "a", ""]), 3).tolist()[0] == partition_of(pa.array([""]), 3).tolist()[0]


def test_offset_of_another_version_is_refused() -> None:
    offset = ChangeOffset("server/db", 7, 1, 2, 3)
    assert ChangeOffset.from_json(offset.to_json()) == offset
    with pytest.raises(InvalidArgument):
        ChangeOffset.from_json({**offset.to_json(), "version": 2})
