"""Following a real PostgreSQL: new tables, idle logs, partitions, limits, acknowledgements."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Follower
from ledger_run import LEAD, follow, rows_of
from random_writers import TABLES, Writers
from strict_ledger import StrictLedger

from millstream.cdc import planner
from millstream.cdc.options import DatabaseAddress
from millstream.cdc.postgres import session
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.database import acknowledge_end, slot_status
from millstream.testing import PostgresDatabase, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"


@pytest.fixture
def followed(postgres: PostgresDatabase, tmp_path: Path) -> Iterator[Follower]:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    follower = Follower(postgres, tmp_path / "segments", tables="orders")
    assert [event["op"] for event in follower.drain()] == ["r"]
    yield follower
    follower.stop()


def confirmed(follower: Follower) -> int:
    status = slot_status(Login(DatabaseAddress(follower.database.dsn)), follower.options["slot"])
    assert status is not None
    return status.confirmed


def test_only_finished_batches_are_acknowledged(followed: Follower) -> None:
    before = confirmed(followed)
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    followed.reader.prepareForTriggerAvailableNow()
    assert followed.plan()
    end = followed.planned[-1]["position"]
    assert len(followed.read()) == 1
    time.sleep(1)  # several status messages are sent to the server
    assert confirmed(followed) <= followed.planned[-2]["position"] < end
    assert confirmed(followed) >= before
    followed.commit()
    followed.database.execute("INSERT INTO orders VALUES (3, 'c')")
    followed.reader.prepareForTriggerAvailableNow()
    assert followed.plan()
    wait_until(lambda: confirmed(followed) == end, what="the finished batch's acknowledgement")


def test_end_of_a_finite_run_is_acknowledged(followed: Follower) -> None:
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    assert len(followed.drain()) == 1
    followed.stop()
    acknowledge_end(Login(DatabaseAddress(followed.database.dsn)), followed.options["slot"], followed.planned[-1])
    assert confirmed(followed) == followed.planned[-1]["position"]
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (3, 'c')")
    assert [json.loads(event["after"])["id"] for event in followed.drain()] == [3]


def test_empty_batch_advances_the_position_when_other_tables_fill_the_log(
    followed: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "IDLE_BYTES", 1 << 20)
    followed.die()
    before = followed.planned[-1]["position"]
    followed.database.execute(
        "CREATE TABLE other (id int PRIMARY KEY, body text)",
        "INSERT INTO other SELECT i, repeat('x', 1000) FROM generate_series(1, 3000) i",
    )
    wait_until(followed.plan, what="an empty batch")
    assert followed.read() == []
    followed.commit()
    assert followed.planned[-1]["position"] >= before + (1 << 20)
    assert not followed.plan(), "and then nothing is planned"
    wait_until(lambda: confirmed(followed) == followed.planned[-1]["position"], what="the acknowledgement")
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    # The remaining log of the other table may be one more empty batch before the change.
    assert [event["op"] for event in followed.drain()] == ["c"]


def test_added_table_is_snapshotted_first(followed: Follower) -> None:
    followed.database.execute(
        "CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items SELECT generate_series(1, 3)"
    )
    followed.options["tables"] = "orders,items"
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    first = followed.drain()
    assert [(event["table"], event["op"]) for event in first] == [("items", "r")] * 3 + [("orders", "c")]
    followed.database.execute("DELETE FROM items WHERE id = 2")
    assert [(event["table"], event["op"], event["key"]) for event in followed.drain()] == [("items", "d", '{"id":2}')]


def test_new_table_under_for_all_tables_is_snapshotted_first(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "CREATE PUBLICATION pub FOR ALL TABLES")
    follower = Follower(postgres, tmp_path, create="true")
    ledger = StrictLedger()
    ledger.apply(follower.drain())
    postgres.execute("CREATE TABLE words (word text PRIMARY KEY)", "INSERT INTO words VALUES ('a'), ('b')")
    ledger.apply(follower.drain())
    postgres.execute("DELETE FROM words WHERE word = 'a'", "INSERT INTO words VALUES ('c')")
    ledger.apply(follower.drain())
    follower.stop()
    ledger.compare("words", rows_of(postgres, "words"), ("word",))
    assert ledger.verdict() == []


def test_partitioned_table_is_followed_through_its_root(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(
        "CREATE TABLE parted (id int, part int, note text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (2)",
        "INSERT INTO parted VALUES (1, 1, 'a'), (2, 2, 'b')",
    )
    follower = Follower(postgres, tmp_path)
    ledger = StrictLedger()
    ledger.apply(follower.drain())
    postgres.execute("UPDATE parted SET part = 2 WHERE id = 1", "INSERT INTO parted VALUES (3, 1, 'c')")
    ledger.apply(follower.drain())
    follower.stop()
    assert set(ledger.tables) == {"parted"}
    ledger.compare("parted", rows_of(postgres, "parted"), ("id", "part"))
    assert ledger.verdict() == []


@pytest.mark.parametrize("partitioned", [False, True])
def test_large_table_is_split_by_sampled_keys_and_every_row_is_in_one_chunk(
    postgres: PostgresDatabase, tmp_path: Path, partitioned: bool
) -> None:
    kind, wide = 'word text COLLATE "en-x-icu" PRIMARY KEY', "WITH (fillfactor = 10)"
    if partitioned:
        sub_events = [
            f"CREATE TABLE w{at} PARTITION OF words FOR VALUES WITH (MODULUS 2, REMAINDER {at}) {wide}" for at in (0, 1)
        ]
        postgres.execute(f"CREATE TABLE words ({kind}) PARTITION BY HASH (word)", *sub_events)
    else:
        postgres.execute(f"CREATE TABLE words ({kind}) {wide}")
    postgres.execute("INSERT INTO words SELECT substr(md5(i::text), 1, 10) FROM generate_series(1, 40000) AS i")
    follower = Follower(postgres, tmp_path, tables="words", chunkRows="10000")
    follower.reader.prepareForTriggerAvailableNow()
    events = []
    while (rows := follower.batch(1)) is not None:
        events.append([event["key"] for event in rows if event["op"] == "r"])
    follower.stop()
    sizes = [len(keys) for keys in events if keys]
    assert len(sizes) in (4, 5), sizes
    assert max(sizes) < 13_000, "a few percent above the target at most"
    assert sorted(key for keys in events for key in keys) == sorted(
        json.dumps({"word": table}, separators=(",", ":")) for (table,) in postgres.execute("SELECT word FROM words")
    )
    assert sizes != [10_000] * 4, "the bounds come from a sample"


def test_snapshot_at_every_start_sends_rows_again_with_new_ids(followed: Follower) -> None:
    followed.options["snapshot"] = "always"
    followed.die()
    first = followed.drain()
    followed.die()
    second = followed.drain()
    assert [event["op"] for event in first + second] == ["r", "r"]
    assert first[0]["id"] != second[0]["id"]


def test_snapshot_never_sends_only_changes_and_excluded_columns_are_absent(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'secret')")
    follower = Follower(postgres, tmp_path, snapshot="never", exclude="public.orders.note")
    assert follower.drain() == []
    postgres.execute("INSERT INTO orders VALUES (2, 'secret')")
    [event] = follower.drain()
    follower.stop()
    assert event["after"] == '{"id":2}'


def test_parallel_partitions_keep_the_order_of_each_key(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(*TABLES)
    follower = Follower(postgres, tmp_path, partitions="3", chunkRows="7")
    ledger = StrictLedger()
    follow(follower, Writers(postgres, 11, truncate=False, allowed=LEAD), ledger, batches=12)
    ledger.apply(follower.drain())
    partitions = follower.reader.partitions(follower.planned[-2], follower.planned[-1])
    follower.stop()
    ledger.compare("words", rows_of(postgres, "words"), ("word",))
    ledger.compare("pairs", rows_of(postgres, "pairs"), ("a", "b"))
    split = [fault for fault in ledger.verdict() if "split" not in fault]
    assert split == []
    assert len(partitions) in (0, 3)


def test_huge_transaction_is_one_batch_in_several_files(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(session, "MAX_PART_BYTES", 1 << 15)
    postgres.execute(ORDERS)
    follower = Follower(postgres, tmp_path, maxBytes="20000", maxChangesPerTrigger="10")
    assert follower.drain(10) == []
    postgres.execute("INSERT INTO orders SELECT i, repeat('x', 50) FROM generate_series(1, 2000) i")
    with postgres.connect(autocommit=False) as connection:
        connection.execute("UPDATE orders SET note = 'y' WHERE id < 5")
        connection.execute("ALTER TABLE orders ADD COLUMN more int DEFAULT 7")
        connection.execute("UPDATE orders SET note = 'z' WHERE id < 5")
    follower.reader.prepareForTriggerAvailableNow()
    assert follower.plan(10)
    assert len(list(tmp_path.glob("0*.seg"))) > 3
    rows = follower.read()
    follower.die()
    assert follower.read() == rows, "a second read gives the same rows"
    follower.commit()
    follower.reader.prepareForTriggerAvailableNow()
    assert [json.loads(row["after"])["id"] for row in rows] == list(range(1, 2001))
    assert [row["position"]["order"] for row in rows] == list(range(2000))
    later = follower.batch(10) or []
    assert [("more" in json.loads(row["after"])) for row in later] == [False] * 4 + [True] * 4
    follower.stop()


def test_read_ahead_stops_at_the_limit_and_continues_after_a_finished_batch(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    postgres.execute(ORDERS)
    follower = Follower(postgres, tmp_path, maxBytes="100000")
    follower.drain()
    for first in range(0, 5000, 100):
        postgres.execute(f"INSERT INTO orders SELECT i, repeat('x', 80) FROM generate_series({first}, {first + 99}) i")
    follower.reader.prepareForTriggerAvailableNow()
    received = 0
    while (rows := follower.batch(500)) is not None:
        received += len(rows)
        held = sum(path.stat().st_size for path in tmp_path.glob("0*.seg"))
        assert held < 100_000 + 3 * (1 << 14) + 40_000, "no more than the limit, a transaction, and what is written"
    assert received == 5000
    follower.stop()


def test_snapshot_neither_waits_for_nor_blocks_transactions(followed: Follower) -> None:
    """A transaction that stays open during the snapshot neither delays it nor is lost."""
    database = followed.database
    followed.options["snapshot"] = "always"
    followed.die()
    with database.connect(autocommit=False) as slow:
        slow.execute("INSERT INTO orders VALUES (50, 'slow')")
        done = threading.Event()
        events: list[dict] = []

        def snapshot() -> None:
            events.extend(followed.drain())
            done.set()

        threading.Thread(target=snapshot, daemon=True).start()
        assert done.wait(30), "the snapshot does not wait for an open transaction"
        slow.commit()
    assert [json.loads(event["after"])["id"] for event in events] == [1]
    assert [json.loads(event["after"])["id"] for event in followed.drain()] == [50]


def test_key_under_full_identity_is_the_key_at_the_time_of_the_change(followed: Follower) -> None:
    followed.database.execute("ALTER TABLE orders REPLICA IDENTITY FULL", "CREATE TABLE kept (id int PRIMARY KEY)")
    followed.options["tables"] = "order*,kept"
    followed.die()
    followed.database.execute("UPDATE orders SET note = 'b' WHERE id = 1", "DROP TABLE orders")
    events = [event for event in followed.drain() if event["table"] == "orders"]
    assert [(event["op"], event["key"]) for event in events] == [("u", '{"id":1}')]


def test_large_chunk_is_decoded_in_several_batches(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.segments.PART_BYTES", 1000)
    postgres.execute(ORDERS, "INSERT INTO orders SELECT i, repeat('x', i * 7) FROM generate_series(1, 200) i")
    follower = Follower(postgres, tmp_path)
    assert follower.plan()
    [part] = follower.reader.partitions(follower.reader.initialOffset(), follower.planned[-1])
    batches = [batch.to_pylist() for batch in follower.reader.read(part)]
    follower.stop()
    assert len(batches) > 100
    rows = [json.loads(row["after"]) for batch in batches for row in batch]
    assert sorted(rows, key=lambda row: row["id"]) == [{"id": i, "note": "x" * (i * 7)} for i in range(1, 201)]
    assert [row["id"] for batch in batches for row in batch] == [f"s:snapshot-1-0:{i}" for i in range(200)]
