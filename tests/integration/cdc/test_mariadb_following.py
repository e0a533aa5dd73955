"""Following a real MariaDB: new tables, idle logs, partitions, limits, excluded columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Follower
from ledger_run import LEAD, follow, rows_of
from random_writers import MARIADB_TABLES, MariadbWriters
from strict_ledger import StrictLedger

from millstream.cdc import planner
from millstream.cdc.mariadb import connection, session
from millstream.testing import MariadbDatabase, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


@pytest.fixture
def followed(mariadb: MariadbDatabase, tmp_path: Path) -> Iterator[Follower]:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    follower = Follower(mariadb, tmp_path / "segments", tables="orders")
    assert [event["op"] for event in follower.drain()] == ["r"]
    yield follower
    follower.stop()


def test_empty_batch_advances_the_position_when_other_tables_fill_the_log(
    followed: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "IDLE_BYTES", 1 << 20)
    followed.die()
    before = followed.planned[-1]["position"]
    followed.database.execute(
        "CREATE TABLE other (id int PRIMARY KEY, body text)",
        "INSERT INTO other SELECT seq, repeat('x', 1000) FROM seq_1_to_3000",
    )
    wait_until(followed.plan, what="an empty batch", timeout_s=60)
    assert followed.read() == []
    followed.commit()
    assert followed.planned[-1]["position"] >= before + (1 << 20)
    assert not followed.plan(), "and then nothing is planned"
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    assert [event["op"] for event in followed.drain()] == ["c"], "and it goes on from there"


def test_sequences_are_not_followed(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, "CREATE SEQUENCE numbers")
    follower = Follower(mariadb, tmp_path / "segments", tables="*")
    assert follower.drain() == []
    mariadb.execute(
        "INSERT INTO orders VALUES (NEXT VALUE FOR numbers, 'a')",
        "CREATE SEQUENCE others",
        "INSERT INTO orders VALUES (NEXT VALUE FOR others + 1, 'b')",
        "SELECT SETVAL(numbers, 5000)",
        "DROP SEQUENCE others",
    )
    assert [json.loads(event["key"]) for event in follower.drain()] == [{"id": 1}, {"id": 2}]
    follower.die()
    mariadb.execute("INSERT INTO orders VALUES (NEXT VALUE FOR numbers, 'c')", "DROP SEQUENCE numbers")
    assert [json.loads(event["key"]) for event in follower.drain()] == [{"id": 5001}]
    follower.stop()


def test_added_table_is_snapshotted_first(followed: Follower) -> None:
    followed.database.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1), (2), (3)")
    followed.options["tables"] = "orders,items"
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    first = followed.drain()
    assert [(event["table"], event["op"]) for event in first] == [("items", "r")] * 3 + [("orders", "c")]
    followed.database.execute("DELETE FROM items WHERE id = 2")
    assert [(event["table"], event["op"], event["key"]) for event in followed.drain()] == [("items", "d", '{"id":2}')]


def test_snapshot_at_every_start_sends_rows_again_with_new_ids(followed: Follower) -> None:
    followed.options["snapshot"] = "always"
    followed.die()
    first = followed.drain()
    followed.die()
    second = followed.drain()
    assert [event["op"] for event in first + second] == ["r", "r"]
    assert first[0]["id"] != second[0]["id"]


def test_snapshot_never_sends_only_changes_and_excluded_columns_are_absent(
    mariadb: MariadbDatabase, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'secret')")
    exclude = f"{mariadb.name}.orders.note"
    never = Follower(mariadb, tmp_path / "never", snapshot="never", exclude=exclude)
    initial = Follower(mariadb, tmp_path / "initial", sourceName="other", exclude=exclude)
    assert never.drain() == []
    assert [event["after"] for event in initial.drain()] == ['{"id":1}']
    mariadb.execute("INSERT INTO orders VALUES (2, 'secret')", "UPDATE orders SET note = 'other' WHERE id = 2")
    for follower in (never, initial):
        events = [(event["op"], event["before"], event["after"]) for event in follower.drain()]
        assert events == [("c", None, '{"id":2}'), ("u", '{"id":2}', '{"id":2}')]
        follower.stop()


def test_parallel_partitions_keep_the_order_of_each_key(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(*MARIADB_TABLES)
    follower = Follower(mariadb, tmp_path, partitions="3", chunkRows="7")
    ledger = StrictLedger()
    follow(follower, MariadbWriters(mariadb, 11, truncate=False, allowed=LEAD), ledger, batches=6)
    ledger.apply(follower.drain())
    mariadb.execute("INSERT INTO words VALUES ('last', 1, NULL)")
    follower.reader.prepareForTriggerAvailableNow()
    assert follower.plan()
    assert len(follower.reader.partitions(follower.planned[-2], follower.planned[-1])) == 3
    ledger.apply(follower.read())
    follower.stop()
    ledger.compare("words", rows_of(mariadb, "words"), ("word",))
    ledger.compare("pairs", rows_of(mariadb, "pairs"), follower.pair_key)
    assert [fault for fault in ledger.verdict() if "split" not in fault] == []


def test_huge_transaction_is_one_batch_in_several_files(
    mariadb: MariadbDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(session, "MAX_PART_BYTES", 1 << 15)
    mariadb.execute(ORDERS)
    follower = Follower(mariadb, tmp_path, maxBytes="20000", maxChangesPerTrigger="10")
    assert follower.drain(10) == []
    mariadb.execute("INSERT INTO orders SELECT seq, repeat('x', 50) FROM seq_1_to_3000")
    follower.reader.prepareForTriggerAvailableNow()
    assert follower.plan(10)
    assert len(list(tmp_path.glob("0*.seg"))) > 2
    rows = follower.read()
    follower.die()
    assert follower.read() == rows, "a second read gives the same rows"
    follower.stop()
    assert [json.loads(row["after"])["id"] for row in rows] == list(range(1, 3001))
    assert [row["position"]["order"] for row in rows] == list(range(3000))


def test_read_ahead_stops_at_the_limit_and_continues_after_a_finished_batch(
    mariadb: MariadbDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(connection, "_RECEIVE", 1 << 14)
    mariadb.execute(ORDERS)
    follower = Follower(mariadb, tmp_path, maxBytes="100000")
    follower.drain()
    for first in range(0, 5000, 100):
        mariadb.execute(f"INSERT INTO orders SELECT seq, repeat('x', 80) FROM seq_{first}_to_{first + 99}")
    follower.reader.prepareForTriggerAvailableNow()
    received = 0
    while (rows := follower.batch(500)) is not None:
        received += len(rows)
        held = sum(path.stat().st_size for path in tmp_path.glob("0*.seg"))
        # Events that arrive together are stored together.
        assert held < 100_000 + 4 * (1 << 14) + 40_000, "no more than the limit, a transaction, and what is written"
    follower.stop()
    assert received == 5000


def test_large_chunk_is_decoded_in_several_batches(
    mariadb: MariadbDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.segments.PART_BYTES", 1000)
    mariadb.execute(ORDERS, "INSERT INTO orders SELECT seq, repeat('x', seq * 7) FROM seq_1_to_200")
    follower = Follower(mariadb, tmp_path)
    assert follower.plan()
    [part] = follower.reader.partitions(follower.reader.initialOffset(), follower.planned[-1])
    batches = [batch.to_pylist() for batch in follower.reader.read(part)]
    follower.stop()
    assert len(batches) > 100
    rows = [json.loads(row["after"]) for batch in batches for row in batch]
    assert rows == [{"id": i, "note": "x" * (i * 7)} for i in range(1, 201)]
    assert [row["id"] for batch in batches for row in batch] == [f"s:snapshot-1-0:{i}" for i in range(200)]
