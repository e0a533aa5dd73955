"""The ledger sees the two faults that this source is built to avoid: they are planted here, and it must complain."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from following import DyingFollower, Follower
from ledger_run import rows_of, run
from strict_ledger import StrictLedger

from millstream.cdc.errors import PositionLost
from millstream.cdc.offsets import ChangeOffset
from millstream.cdc.planner import Planner
from millstream.cdc.postgres.pgoutput import BEGIN, parse_begin
from millstream.cdc.segments import Numbers, read_segment
from millstream.cdc.visibility import SeenTable
from millstream.testing import PostgresDatabase, PostgresProcess, wait_until

pytestmark = pytest.mark.timeout(300)


class SlowCommit:
    """A commit whose record is in the log while nobody sees what it did: it waits for a standby that never comes."""

    def __init__(self, server: PostgresProcess, statement: str) -> None:
        self._server = server
        server.main.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        wait_until(lambda: server.main.execute("SHOW synchronous_standby_names") == [("nobody",)])
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


def snapshot_beside_a_slow_commit(server: PostgresProcess, segments: Path) -> StrictLedger:
    """A chunk is read between a commit's record and its visibility; the change comes later, from the log."""
    database = server.main
    database.execute("CREATE TABLE words (word text PRIMARY KEY, n int)", "INSERT INTO words VALUES ('a', 1), ('b', 2)")
    follower = Follower(database, segments)
    follower.start = follower.reader.initialOffset()
    slow = SlowCommit(server, "INSERT INTO words VALUES ('c', 3)")
    ledger = StrictLedger()
    ledger.apply(follower.batch() or [])
    assert len(ledger.tables["words"]) == 2, "the chunk does not see the slow commit"
    slow.finish()
    ledger.apply(follower.drain())
    follower.stop()
    ledger.compare("words", rows_of(database, "words"), ("word",))
    return ledger


def test_a_chunk_knows_what_it_saw_though_the_log_was_further(tmp_path: Path) -> None:
    with PostgresProcess() as server:
        assert snapshot_beside_a_slow_commit(server, tmp_path).verdict() == []


def test_with_the_cut_by_lsn_the_ledger_complains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before_the_chunk(table: SeenTable, xids: Numbers) -> Any:
        """What others do: seen is whatever the log had when the chunk was read."""
        places = {}
        for path in tmp_path.glob("0*.seg"):
            segment = read_segment(path)
            for start, end in zip(segment.starts.tolist(), segment.ends.tolist(), strict=True):
                if segment.body[start] == BEGIN:
                    begin = parse_begin(bytes(segment.body[start:end]))
                    places[begin.xid] = begin.lsn
        return np.array([[places[xid] < table.settled for xid in xids.tolist()]] * len(table.snapshots))

    monkeypatch.setattr(SeenTable, "judge", before_the_chunk)
    with PostgresProcess() as server:
        faults = snapshot_beside_a_slow_commit(server, tmp_path).verdict()
    assert faults == ['words {"word":"c"} is in the table and not in the stream']


def test_with_positions_acknowledged_early_the_ledger_complains(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Planner.next_offset

    def hasty(self: Planner, finished: ChangeOffset, max_changes: int | None) -> ChangeOffset | None:
        end = honest(self, finished, max_changes)
        if end is not None and self._session is not None:
            self._session.acknowledge(end.position)
            wait_until(lambda: self._session is None or self._session._told >= end.position)
        return end

    monkeypatch.setattr(Planner, "next_offset", hasty)
    follower = DyingFollower(postgres, tmp_path, chance=random.Random(1), chunkRows="7")
    with pytest.raises(PositionLost, match="ahead of the checkpoint"):
        assert run(postgres, follower, 5, batches=60).verdict() == []
    follower.stop()
