"""The strict ledger detects planted faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_faults
import pytest
from following import Follower
from ledger_run import Database, rows_of
from strict_ledger import StrictLedger

from millstream.cdc.errors import PositionLost
from millstream.cdc.mariadb import catalog as mariadb_catalog
from millstream.testing import MariadbDatabase, PostgresDatabase, PostgresProcess, wait_until

pytestmark = pytest.mark.timeout(300)

WORDS = ("CREATE TABLE words (word varchar(9) PRIMARY KEY, n int)", "INSERT INTO words VALUES ('a', 1), ('b', 2)")
THE_THIRD = "INSERT INTO words VALUES ('c', 3)"
LOST = ['words {"word":"c"} is in the table and not in the stream']


class SlowCommit:
    """A commit that is in the log but not yet visible to any transaction: it waits for a standby that does not
    exist."""

    def __init__(self, server: PostgresProcess, statement: str) -> None:
        self._server = server
        server.main.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'", "SELECT pg_reload_conf()")
        wait_until(lambda: server.main.execute("SHOW synchronous_standby_names") == [("absent",)])
        self._thread = threading.Thread(target=server.main.execute, args=(statement,))
        self._thread.start()
        wait_until(self._waiting, what="the commit's wait")

    def _waiting(self) -> list[Any]:
        return self._server.main.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")

    def finish(self) -> None:
        for (pid,) in self._waiting():
            self._server.main.execute(f"SELECT pg_cancel_backend({pid})")
        self._thread.join(30)
        self._server.main.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def finished(database: Database, follower: Follower, ledger: StrictLedger) -> StrictLedger:
    ledger.apply(follower.drain())
    follower.stop()
    ledger.compare("words", rows_of(database, "words"), ("word",))
    return ledger


# --- what a chunk saw ----------------------------------------------------------------------------------------------


def snapshot_beside_a_slow_commit(server: PostgresProcess, segments: Path) -> StrictLedger:
    """A chunk is read between a commit's record and its visibility; the change comes later, from the log."""
    database = server.main
    database.execute(*WORDS)
    follower = Follower(database, segments)
    follower.start = follower.reader.initialOffset()
    slow = SlowCommit(server, THE_THIRD)
    ledger = StrictLedger()
    ledger.apply(follower.batch() or [])
    assert len(ledger.tables["words"]) == 2, "the slow commit is not visible to the chunk"
    slow.finish()
    return finished(database, follower, ledger)


def test_chunk_includes_visible_transactions_only(tmp_path: Path) -> None:
    with PostgresProcess() as server:
        assert snapshot_beside_a_slow_commit(server, tmp_path).verdict() == []


def test_ledger_detects_chunks_filtered_by_lsn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_faults.cut_by_lsn(monkeypatch.setattr, str(tmp_path))
    with PostgresProcess() as server:
        assert snapshot_beside_a_slow_commit(server, tmp_path).verdict() == LOST


def snapshot_beside_a_commit(
    database: MariadbDatabase, segments: Path, between: Callable[[Callable[[], None]], None]
) -> StrictLedger:
    """``between`` runs its argument after the start of a chunk's transaction."""
    database.execute(*WORDS)
    follower = Follower(database, segments)
    follower.start = follower.reader.initialOffset()
    assert follower.plan()
    to_come = [THE_THIRD]

    def commit() -> None:
        while to_come:
            database.execute(to_come.pop())

    between(commit)
    ledger = StrictLedger()
    ledger.apply(follower.read())
    follower.commit()
    assert len(ledger.tables["words"]) == 2, "the commit is not visible to the chunk"
    return finished(database, follower, ledger)


def test_mariadb_chunk_has_its_exact_log_position(
    mariadb: MariadbDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mariadb_catalog.fetch_rows

    def between(commit: Callable[[], None]) -> None:
        def fetch_rows(connection: Any, statement: str, *values: Any) -> Any:
            rows = original(connection, statement, *values)
            if statement.startswith("START TRANSACTION"):
                commit()
            return rows

        monkeypatch.setattr(mariadb_catalog, "fetch_rows", fetch_rows)

    assert snapshot_beside_a_commit(mariadb, tmp_path, between).verdict() == []


def test_ledger_detects_mariadb_chunks_filtered_by_log_end(
    mariadb: MariadbDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def between(commit: Callable[[], None]) -> None:
        planted_faults.cut_by_master_status(monkeypatch.setattr, commit)

    assert snapshot_beside_a_commit(mariadb, tmp_path, between).verdict() == LOST


# --- what is acknowledged ------------------------------------------------------------------------------------------


def death_of_a_planned_batch(database: Database, segments: Path) -> StrictLedger:
    """The batch was planned and not read; its read-ahead log is lost with the process."""
    database.execute(*WORDS)
    follower = Follower(database, segments)
    ledger = StrictLedger()
    ledger.apply(follower.drain())
    database.execute(THE_THIRD)
    follower.die()
    wait_until(follower.plan, what="the change")
    follower.die()
    for path in segments.glob("0*.seg"):
        path.unlink()
    try:
        ledger.apply(follower.read())
        follower.commit()
        return finished(database, follower, ledger)
    finally:
        follower.stop()


@pytest.fixture(params=["postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    server: PostgresDatabase | MariadbDatabase = request.getfixturevalue(request.param)
    return server


def test_planned_but_unread_batch_is_replayed(database: Database, tmp_path: Path) -> None:
    assert death_of_a_planned_batch(database, tmp_path).verdict() == []


def test_positions_acknowledged_early_raise_position_lost(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_faults.acknowledged_early(monkeypatch.setattr)
    with pytest.raises(PositionLost, match="pipeline reset"):
        death_of_a_planned_batch(database, tmp_path)


def test_ledger_detects_positions_acknowledged_early(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_faults.acknowledged_early(monkeypatch.setattr)
    planted_faults.gap_not_checked(monkeypatch.setattr)
    assert death_of_a_planned_batch(database, tmp_path).verdict() == LOST


def test_planted_kill_happens_after_the_snapshot(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[int] = []
    monkeypatch.setattr(planted_faults.os, "killpg", lambda group, signal: deaths.append(group))
    planted_faults.killed_after_planning(monkeypatch.setattr)
    database.execute(*WORDS)
    follower = Follower(database, tmp_path, chunkRows="1")
    try:
        for _ in range(2):
            wait_until(lambda: follower.plan(1), what="a chunk")
            assert len(follower.read()) == 1
            follower.commit()
        while not deaths:
            database.execute("UPDATE words SET n = n + 1")
            follower.batch()
    finally:
        follower.stop()
    assert len(deaths) == 1
