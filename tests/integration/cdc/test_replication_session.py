"""One session keeps the slot open across batches and answers the server; tasks never open the slot."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from following import Event, Follower

from millstream.cdc.errors import SegmentDamaged
from millstream.cdc.postgres import session
from millstream.testing import PostgresDatabase, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"
IMPATIENT = "options=-c%20wal_sender_timeout%3D4s"
LONG = "interval '9 seconds'"
"""More than twice that: a server that receives nothing has closed the session by then."""


def holder(follower: Follower) -> int | None:
    """The process of the server that serves the slot's reader."""
    slot = follower.options["slot"]
    [(pid,)] = follower.database.execute(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'")
    return None if pid is None else int(pid)


def long_since(follower: Follower, pid: int | None) -> bool:
    """Waits by the server's clock. Also true if the session was replaced, because then a wait would never end."""
    age = f"SELECT clock_timestamp() - backend_start > {LONG} FROM pg_stat_replication WHERE pid = {pid or 0}"
    return follower.database.execute(age) in ([(True,)], [])


def test_session_answers_the_server_during_a_long_batch(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the session waits for the log, or for room to read on."""
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    postgres.execute(ORDERS)
    dsn = f"{postgres.dsn}{'&' if '?' in postgres.dsn else '?'}{IMPATIENT}"
    waiting = Follower(postgres, tmp_path / "waiting", dsn=dsn)
    full = Follower(postgres, tmp_path / "full", dsn=dsn, slot=f"full_{postgres.name}", maxBytes="50000")
    for follower in (waiting, full):
        assert follower.drain() == []
    for first in range(0, 5000, 500):
        postgres.execute(f"INSERT INTO orders SELECT i, repeat('x', 80) FROM generate_series({first}, {first + 499}) i")
    held: list[tuple[Follower, int | None, list[Event]]] = []
    for follower in (waiting, full):
        follower.reader.prepareForTriggerAvailableNow()
        assert follower.plan(500)
        held.append((follower, holder(follower), follower.read()))
    assert full.reader._planner is not None
    assert full.reader._planner._read_ahead is not None
    wait_until(full.reader._planner._read_ahead.full, what="a full read-ahead log", timeout_s=60)
    for follower, pid, rows in held:
        wait_until(lambda f=follower, p=pid: long_since(f, p), what="a long batch", timeout_s=120)
        assert pid is not None
        assert holder(follower) == pid, "the session was not reopened"
        follower.commit()
        statuses = len(rows)
        while (more := follower.batch(500)) is not None:
            statuses += len(more)
        assert statuses == 5000
        assert holder(follower) == pid, "the slot was opened once for ten batches"
        follower.stop()


def test_tasks_never_open_the_slot(postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    follower = Follower(postgres, tmp_path)
    follower.drain()
    postgres.execute("INSERT INTO orders VALUES (2, 'b')", "DELETE FROM orders WHERE id = 1")
    follower.reader.prepareForTriggerAvailableNow()
    assert follower.plan()
    [partition] = follower.reader.partitions(follower.planned[-2], follower.planned[-1])
    task = pickle.dumps((follower.reader, partition))
    follower.stop()
    wait_until(lambda: holder(follower) is None, what="the slot's release", timeout_s=60)

    def opened(*_: Any) -> None:
        raise AssertionError("a task opens a replication connection")

    monkeypatch.setattr(session, "ReplicationConnection", opened)
    reader, partition = pickle.loads(task)
    events = [(row["op"], row["key"]) for batch in reader.read(partition) for row in batch.to_pylist()]
    assert events == [("c", '{"id":2}'), ("d", '{"id":1}')]
    for path in tmp_path.glob("0*.seg"):
        path.unlink()
    with pytest.raises(SegmentDamaged, match="segmentsShared"):
        list(reader.read(partition))
    assert holder(follower) is None
