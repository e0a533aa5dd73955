"""Tasks that cannot read the driver's files receive all data in their input partitions. Against real servers."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import pytest
from following import Follower

from millstream.cdc import options, transfer
from millstream.cdc.errors import SourceRefused
from millstream.cdc.mariadb import session as mariadb_session
from millstream.cdc.postgres import session as postgres_session
from millstream.testing import MariadbDatabase, PostgresDatabase
from support.fake_hadoop import FakeHadoop

Database = PostgresDatabase | MariadbDatabase


@pytest.fixture(params=["postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    server: Database = request.getfixturevalue(request.param)
    return server


def _filled(database: Database, rows: int) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note varchar(100))")
    for first in range(1, rows + 1, 1000):
        values = ", ".join(f"({number}, 'row {number}')" for number in range(first, min(rows + 1, first + 1000)))
        database.execute(f"INSERT INTO orders VALUES {values}")


def _update(database: Database, times: int) -> None:
    for number in range(times):
        database.execute(f"UPDATE orders SET note = 'update {number}' WHERE id = {number % 20 + 1}")


def test_rows_changes_and_truncations_need_no_shared_directory(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_ROWS_BYTES", 200)
    _filled(database, 50)
    remote = Follower(database, tmp_path / "remote", segmentsShared="false", chunkRows="20", partitions="2")
    try:
        rows = remote.drain()
        assert sorted(event["id"] for event in rows) == sorted(
            f"s:snapshot-1-{index}:{number}" for index, count in enumerate((20, 20, 10)) for number in range(count)
        )
        _update(database, 60)
        database.execute("DELETE FROM orders WHERE id = 1", "TRUNCATE TABLE orders")
        remote.reader.prepareForTriggerAvailableNow()
        changes = []
        while (batch := remote.batch(limit=7)) is not None:
            assert 0 < len(batch) <= 7
            changes += batch
        assert sorted(event["op"] for event in changes if event["op"] != "u") == ["d", "t"]
        assert len({event["id"] for event in changes}) == len(changes) == 62
    finally:
        remote.stop()


def test_transaction_in_several_files_is_one_partition(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in (postgres_session, mariadb_session):
        monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 12)
        monkeypatch.setattr(session, "MAX_PART_BYTES", 1 << 13)
    monkeypatch.setattr(transfer, "MAX_LOG_BYTES", 1 << 12)
    _filled(database, 1)
    follower = Follower(database, tmp_path, segmentsShared="false")
    try:
        assert len(follower.drain()) == 1
        values = ", ".join(f"({number}, '{'x' * 90}')" for number in range(2, 1002))
        database.execute(f"INSERT INTO orders VALUES {values}")
        follower.reader.prepareForTriggerAvailableNow()
        assert follower.plan()
        rows = follower.read()
        assert [event["key"] for event in rows] == [f'{{"id":{number}}}' for number in range(2, 1002)]
        assert follower.read() == rows, "a replayed batch has the same rows in the same order"
    finally:
        follower.stop()


def test_partition_of_a_backlog_has_only_its_own_transactions(database: Database, tmp_path: Path) -> None:
    _filled(database, 20)
    follower = Follower(database, tmp_path, segmentsShared="false")
    try:
        follower.drain()
        _update(database, 300)
        follower.reader.prepareForTriggerAvailableNow()
        sizes, received = [], 0
        while follower.plan(limit=30):
            start, end = follower.planned[-2:]
            [partition] = follower.reader.partitions(start, end)
            sizes.append(len(pickle.dumps(partition)))
            received += len(follower.read())
            follower.commit()
        assert received == 300
        assert len(sizes) >= 10
        assert max(sizes) < 6_000
    finally:
        follower.stop()


def test_transaction_beyond_the_limit_is_refused(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_MAX_PACKED_BYTES", 1_000)
    _filled(database, 1)
    follower = Follower(database, tmp_path, segmentsShared="false")
    try:
        follower.drain()
        values = ", ".join(f"({number}, 'note {number * 7919}')" for number in range(2, 1002))
        database.execute(f"INSERT INTO orders VALUES {values}")
        follower.reader.prepareForTriggerAvailableNow()
        assert follower.plan()
        with pytest.raises(SourceRefused, match="one transaction"):
            follower.read()
    finally:
        follower.stop()


@pytest.mark.parametrize("location", ["hdfs://namenode:8020/orders", "s3a://bucket/orders"])
def test_another_host_continues_from_a_store(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    """Plans and chunks are in the store. The read-ahead log is in a temporary directory that each restart loses."""
    hadoop = FakeHadoop()
    monkeypatch.setattr(options, "connect", lambda file: lambda: hadoop)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _filled(database, 50)
    follower = Follower(database, Path("unused"), segmentsShared="false", chunkRows="10")
    follower.options |= {"segments": location, "gatewayFile": "unused"}
    follower.die()
    try:
        events = []
        follower.reader.prepareForTriggerAvailableNow()
        while follower.plan(limit=20):
            rows = follower.read()
            database.execute(f"UPDATE orders SET note = 'changed' WHERE id = {len(events) + 1}")
            follower.die()
            assert follower.read() == rows, "a replayed batch has the same rows in the same order"
            events += rows
            follower.commit()
            follower.reader.prepareForTriggerAvailableNow()
        assert [event["op"] for event in events].count("r") == 50
        state = {}
        for event in events:
            assert event["op"] == "r" or event["key"] in state
            state[event["key"]] = json.loads(event["after"])["note"]
        expected = {f'{{"id":{key}}}': note for key, note in database.execute("SELECT id, note FROM orders")}
        assert state == expected
        assert f"{location}/seen-1.json" in hadoop.files
    finally:
        follower.stop()
    assert not list(tmp_path.glob("millstream-read-ahead-*")), "the temporary directory is removed"
