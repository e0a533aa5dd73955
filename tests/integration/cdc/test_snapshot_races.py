"""Races during a snapshot: two attempts at one chunk, and a truncate between two chunks."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from following import Event, Follower
from ledger_run import Database, rows_of
from strict_ledger import StrictLedger

from millstream.cdc.errors import SnapshotLost
from millstream.cdc.mariadb import snapshot as mariadb_snapshot
from millstream.cdc.planner import Planner
from millstream.cdc.postgres import snapshot as postgres_snapshot
from millstream.testing import PostgresDatabase

WORDS = "CREATE TABLE words (word varchar(9) PRIMARY KEY, n int)"


@pytest.fixture(params=["postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    server: Database = request.getfixturevalue(request.param)
    return server


class HeldAttempt:
    """The first attempt that has read its rows stops before it writes them, until the test lets it continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_read, self._go = threading.Event(), threading.Event()
        honest = postgres_snapshot.write_segment

        def write(*arguments: Any) -> bool:
            if not self.has_read.is_set():
                self.has_read.set()
                assert self._go.wait(60)
            return honest(*arguments)

        for module in (postgres_snapshot, mariadb_snapshot):
            monkeypatch.setattr(module, "write_segment", write)

    def let_go(self) -> None:
        self._go.set()


def attempt(task: bytes) -> list[Event]:
    """As a task does it: with a reader and a partition of its own."""
    reader, partition = pickle.loads(task)
    return [row for batch in reader.read(partition) for row in batch.to_pylist()]


def test_first_of_two_attempts_at_a_chunk_wins(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the chunk, with a commit in between: the second to finish returns the rows of the first."""
    database.execute(WORDS, "INSERT INTO words VALUES ('a', 1), ('b', 2)")
    follower, ledger = Follower(database, tmp_path), StrictLedger()
    assert follower.plan()
    [partition] = follower.reader.partitions(follower.start, follower.planned[-1])
    task = pickle.dumps((follower.reader, partition))
    held, slow = HeldAttempt(monkeypatch), []
    thread = threading.Thread(target=lambda: slow.append(attempt(task)))
    thread.start()
    assert held.has_read.wait(60)
    database.execute("UPDATE words SET n = 9 WHERE word = 'a'", "INSERT INTO words VALUES ('c', 3)")
    quick = attempt(task)
    held.let_go()
    thread.join(60)
    assert [event["key"] for event in quick] == ['{"word":"a"}', '{"word":"b"}', '{"word":"c"}']
    assert slow == [quick]
    assert attempt(task) == quick, "and also for later attempts"
    ledger.apply(quick)
    follower.commit()
    database.execute("DELETE FROM words WHERE word = 'c'")
    changes = follower.drain()
    follower.stop()
    assert [(event["op"], event["key"]) for event in changes] == [("d", '{"word":"c"}')], (
        "the changes that it saw are not sent again"
    )
    ledger.apply(changes)
    ledger.compare("words", rows_of(database, "words"), ("word",))
    assert ledger.verdict() == []


def truncated_between_chunks(database: Database, segments: Path) -> tuple[list[Event], StrictLedger]:
    """Two rows a chunk, one chunk a batch; the table is emptied when the first chunk was read."""
    database.execute(WORDS, "INSERT INTO words VALUES ('a', 1), ('b', 2), ('c', 3), ('d', 4), ('e', 5)")
    follower = Follower(database, segments, chunkRows="2")
    try:
        return _emptied_meanwhile(database, follower)
    finally:
        follower.stop()


def _emptied_meanwhile(database: Database, follower: Follower) -> tuple[list[Event], StrictLedger]:
    ledger, events = StrictLedger(), []
    first = follower.batch(limit=2) or []
    assert [event["key"] for event in first] == ['{"word":"a"}', '{"word":"b"}']
    database.execute("TRUNCATE words", "INSERT INTO words VALUES ('a', 6), ('z', 7)")
    follower.reader.prepareForTriggerAvailableNow()
    rows: list[Event] | None = first
    while rows is not None:
        events += rows
        ledger.apply(rows)
        rows = follower.batch(limit=2)
    ledger.compare("words", rows_of(database, "words"), ("word",))
    return events, ledger


def test_truncate_between_two_chunks_restarts_the_snapshot(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        events, ledger = truncated_between_chunks(database, tmp_path)
    assert "words was truncated during its snapshot" in caplog.text
    assert ledger.verdict() == []
    assert [event["op"] for event in events].count("t") == 1
    behind = events[[event["op"] for event in events].index("t") + 1 :]
    assert [(event["op"], event["key"]) for event in behind] == [("r", '{"word":"a"}'), ("r", '{"word":"z"}')]


def test_snapshot_that_was_not_restarted_is_snapshot_lost(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "_disputed_truncation", lambda *_: None)
    with pytest.raises(SnapshotLost, match="was emptied in the middle of its snapshot"):
        truncated_between_chunks(database, tmp_path)


def test_column_that_is_renamed_or_added_after_the_plan_of_a_snapshot_is_in_its_rows(
    database: Database, tmp_path: Path
) -> None:
    """The log does not contain these values: neither statement logs a change of a row."""
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, note text)",
        "INSERT INTO people VALUES (1, 'n')",
    )
    follower = Follower(database, tmp_path, tables="people")
    assert follower.plan()
    database.execute(
        "ALTER TABLE people RENAME COLUMN note TO remark",
        "ALTER TABLE people ADD COLUMN status varchar(9) DEFAULT 'new'",
    )
    [event] = follower.read()
    follower.stop()
    assert json.loads(event["after"]) == {"id": 1, "remark": "n", "status": "new"}


def test_column_that_the_publication_omits_is_not_in_the_rows_of_a_snapshot(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    if int(postgres.execute("SHOW server_version_num")[0][0]) < 150_000:
        pytest.skip("column lists need PostgreSQL 15")
    postgres.execute(
        "CREATE TABLE people (id int PRIMARY KEY, note text, email text)",
        "INSERT INTO people VALUES (1, 'n', 'a@x')",
        "CREATE PUBLICATION pub FOR TABLE people (id, note) WITH (publish_via_partition_root = true)",
    )
    follower = Follower(postgres, tmp_path, tables="people")
    assert follower.plan()
    postgres.execute("ALTER TABLE people RENAME COLUMN note TO remark", "ALTER TABLE people ADD COLUMN phone text")
    [event] = follower.read()
    follower.stop()
    assert json.loads(event["after"]) == {"id": 1, "remark": "n"}
