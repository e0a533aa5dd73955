"""What a follower of a real PostgreSQL does besides: tables that come, quiet logs, lanes, limits, acknowledgements."""

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
    found = slot_status(Login(DatabaseAddress(follower.database.dsn)), follower.options["slot"])
    assert found is not None
    return found.confirmed


def test_only_finished_batches_are_acknowledged(followed: Follower) -> None:
    before = confirmed(followed)
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    followed.reader.prepareForTriggerAvailableNow()
    assert followed.plan()
    end = followed.planned[-1]["position"]
    assert len(followed.read()) == 1
    time.sleep(1)  # several answers to the server go by
    assert confirmed(followed) <= followed.planned[-2]["position"] < end
    assert confirmed(followed) >= before
    followed.commit()
    followed.database.execute("INSERT INTO orders VALUES (3, 'c')")
    followed.reader.prepareForTriggerAvailableNow()
    assert followed.plan()
    wait_until(lambda: confirmed(followed) == end, what="the finished batch's acknowledgement")


def test_the_end_of_a_run_is_told_to_the_slot_from_outside(followed: Follower) -> None:
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    assert len(followed.drain()) == 1
    followed.stop()
    acknowledge_end(Login(DatabaseAddress(followed.database.dsn)), followed.options["slot"], followed.planned[-1])
    assert confirmed(followed) == followed.planned[-1]["position"]
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (3, 'c')")
    assert [json.loads(event["after"])["id"] for event in followed.drain()] == [3]


def test_an_empty_batch_moves_on_when_other_tables_fill_the_log(
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
    assert not followed.plan(), "and then it rests"
    wait_until(lambda: confirmed(followed) == followed.planned[-1]["position"], what="the acknowledgement")
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    wait_until(followed.plan, what="the next change")
    assert [event["op"] for event in followed.read()] == ["c"]


def test_a_table_that_is_added_gets_its_rows_first(followed: Follower) -> None:
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


def test_a_table_that_comes_while_all_tables_are_published_gets_its_rows_first(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
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


def test_a_partitioned_table_is_followed_through_its_root(postgres: PostgresDatabase, tmp_path: Path) -> None:
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
def test_a_large_table_is_cut_by_a_sample_of_its_keys_and_every_row_is_in_one_chunk(
    postgres: PostgresDatabase, tmp_path: Path, partitioned: bool
) -> None:
    kind, wide = 'word text COLLATE "en-x-icu" PRIMARY KEY', "WITH (fillfactor = 10)"
    if partitioned:
        halves = [
            f"CREATE TABLE w{at} PARTITION OF words FOR VALUES WITH (MODULUS 2, REMAINDER {at}) {wide}" for at in (0, 1)
        ]
        postgres.execute(f"CREATE TABLE words ({kind}) PARTITION BY HASH (word)", *halves)
    else:
        postgres.execute(f"CREATE TABLE words ({kind}) {wide}")
    postgres.execute("INSERT INTO words SELECT substr(md5(i::text), 1, 10) FROM generate_series(1, 40000) AS i")
    follower = Follower(postgres, tmp_path, tables="words", chunkRows="10000")
    follower.reader.prepareForTriggerAvailableNow()
    told = []
    while (rows := follower.batch(1)) is not None:
        told.append([event["key"] for event in rows if event["op"] == "r"])
    follower.stop()
    sizes = [len(keys) for keys in told if keys]
    assert len(sizes) in (4, 5), sizes
    assert max(sizes) < 13_000, "some percent more than asked for, and no more"
    assert sorted(key for keys in told for key in keys) == sorted(
        json.dumps({"word": word}, separators=(",", ":")) for (word,) in postgres.execute("SELECT word FROM words")
    )
    assert sizes != [10_000] * 4, "all keys were put in order for it"


def test_a_snapshot_at_every_start_brings_the_rows_again_under_new_ids(followed: Follower) -> None:
    followed.options["snapshot"] = "always"
    followed.die()
    first = followed.drain()
    followed.die()
    second = followed.drain()
    assert [event["op"] for event in first + second] == ["r", "r"]
    assert first[0]["id"] != second[0]["id"]


def test_never_means_changes_alone_and_excluded_columns_are_in_neither(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'secret')")
    follower = Follower(postgres, tmp_path, snapshot="never", exclude="public.orders.note")
    assert follower.drain() == []
    postgres.execute("INSERT INTO orders VALUES (2, 'secret')")
    [event] = follower.drain()
    follower.stop()
    assert event["after"] == '{"id":2}'


def test_lanes_keep_the_order_of_each_key(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(*TABLES)
    follower = Follower(postgres, tmp_path, lanes="3", chunkRows="7")
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


def test_a_transaction_larger_than_everything_is_one_batch_in_several_files(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(session, "_HUGE", 1 << 15)
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
    assert follower.read() == rows, "and so it is when it is read again"
    follower.commit()
    follower.reader.prepareForTriggerAvailableNow()
    assert [json.loads(row["after"])["id"] for row in rows] == list(range(1, 2001))
    assert [row["position"]["order"] for row in rows] == list(range(2000))
    later = follower.batch(10) or []
    assert [("more" in json.loads(row["after"])) for row in later] == [False] * 4 + [True] * 4
    follower.stop()


def test_reading_ahead_stops_at_the_limit_and_goes_on_when_a_batch_is_finished(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SEGMENT_BYTES", 1 << 14)
    postgres.execute(ORDERS)
    follower = Follower(postgres, tmp_path, maxBytes="100000")
    follower.drain()
    for first in range(0, 5000, 100):
        postgres.execute(f"INSERT INTO orders SELECT i, repeat('x', 80) FROM generate_series({first}, {first + 99}) i")
    follower.reader.prepareForTriggerAvailableNow()
    seen = 0
    while (rows := follower.batch(500)) is not None:
        seen += len(rows)
        held = sum(path.stat().st_size for path in tmp_path.glob("0*.seg"))
        assert held < 100_000 + 3 * (1 << 14) + 40_000, "no more than the limit, a transaction, and what is written"
    assert seen == 5000
    follower.stop()


def test_a_snapshot_waits_for_nobody_and_nobody_waits_for_it(followed: Follower) -> None:
    """A transaction that stays open beside it is neither waited for nor lost."""
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
        assert done.wait(30), "the snapshot waits for an open transaction"
        slow.commit()
    assert [json.loads(event["after"])["id"] for event in events] == [1]
    assert [json.loads(event["after"])["id"] for event in followed.drain()] == [50]
