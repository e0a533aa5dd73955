"""Table changes without row events are detected. Against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Event, Follower

from millstream.cdc.errors import InvalidChangeOption, SourceRefused, TableChanged
from millstream.cdc.postgres.database import change_options
from millstream.testing import MariadbDatabase, PostgresDatabase, wait_until

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text)"
SWAP = (
    "CREATE TABLE orders_new (id int PRIMARY KEY, note text)",
    "INSERT INTO orders_new VALUES (7, 'new')",
    "BEGIN; ALTER TABLE orders RENAME TO orders_old; ALTER TABLE orders_new RENAME TO orders; COMMIT",
)
RECREATE = ("DROP TABLE orders", ORDERS, "INSERT INTO orders VALUES (7, 'new')")
REPUBLISH = (
    "ALTER PUBLICATION pub DROP TABLE orders",
    "DELETE FROM orders",
    "INSERT INTO orders VALUES (7, 'new')",
    "ALTER PUBLICATION pub ADD TABLE orders",
)
UNPUBLISH = REPUBLISH[:3]
CHANGES = pytest.mark.parametrize(
    "statements", [SWAP, RECREATE, REPUBLISH, UNPUBLISH], ids=["swap", "recreate", "republish", "unpublish"]
)
PARTED = (
    "CREATE TABLE parted (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_0 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    "INSERT INTO parted VALUES (1, 'a')",
)
ATTACH = (
    "CREATE TABLE parted_1 (id int PRIMARY KEY, note text)",
    "INSERT INTO parted_1 VALUES (17, 'new')",
    "ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (10) TO (20)",
)
ATTACH_AT_ONCE = ("; ".join(["BEGIN", *ATTACH, "COMMIT"]),)
DETACH = ("ALTER TABLE parted DETACH PARTITION parted_0", "DROP TABLE parted_0")
PARTITIONS = pytest.mark.parametrize(
    "statements", [ATTACH, ATTACH_AT_ONCE, DETACH], ids=["attach", "attach-at-once", "detach"]
)


def _state(events: list[Event], state: dict[int, str] | None = None) -> dict[int, str]:
    """The table that the events describe."""
    state = {} if state is None else state
    for event in events:
        if event["op"] == "t":
            state.clear()
        elif event["op"] == "d":
            del state[json.loads(event["key"])["id"]]
        else:
            row = json.loads(event["after"])
            state[row["id"]] = row["note"]
    return state


def _follow(
    database: PostgresDatabase | MariadbDatabase, segments: Path, table: str, **options: str
) -> Iterator[Follower]:
    follower = Follower(database, segments, tables=table, **options)
    try:
        assert [event["op"] for event in follower.drain()] == ["r"]
        yield follower
    finally:
        follower.stop()


@pytest.fixture
def followed(postgres: PostgresDatabase, tmp_path: Path) -> Iterator[Follower]:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    yield from _follow(postgres, tmp_path / "segments", "orders")


@pytest.fixture
def parted(postgres: PostgresDatabase, tmp_path: Path) -> Iterator[Follower]:
    postgres.execute(*PARTED)
    yield from _follow(postgres, tmp_path / "segments", "parted")


def _changed(follower: Follower) -> str:
    with pytest.raises(TableChanged) as caught:
        follower.drain()
    return str(caught.value)


@CHANGES
@pytest.mark.parametrize("restarted", [True, False])
def test_postgres_table_change_stops_the_reader(
    followed: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    if restarted:
        followed.die()
    followed.database.execute(*statements)
    message = _changed(followed)
    assert "public.orders" in message
    assert "on_table_change: snapshot" in message
    assert "millstream pipeline reset" in message
    followed.die()
    _changed(followed)


@pytest.mark.parametrize("statements", [SWAP, RECREATE], ids=["swap", "recreate"])
def test_table_change_under_for_all_tables_stops_the_reader(
    postgres: PostgresDatabase, tmp_path: Path, statements: tuple[str, ...]
) -> None:
    """Such a publication has no entry per table, so only the table's number in the catalog differs."""
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE PUBLICATION pub FOR ALL TABLES")
    for follower in _follow(postgres, tmp_path, "orders"):
        postgres.execute(*(statement for statement in statements if "PUBLICATION" not in statement))
        assert "public.orders" in _changed(follower)


@CHANGES
@pytest.mark.parametrize("restarted", [True, False])
def test_postgres_table_change_can_take_a_new_snapshot(
    followed: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    state = {1: "a"}
    followed.options["onTableChange"] = "snapshot"
    followed.die()
    followed.database.execute("INSERT INTO orders VALUES (2, 'b')")
    _state(followed.drain(), state)
    if restarted:
        followed.die()
    followed.database.execute(*statements)
    events = followed.drain()
    assert "t" in [event["op"] for event in events]
    assert len({event["id"] for event in events}) == len(events)
    followed.database.execute("INSERT INTO orders VALUES (8, 'later')")
    events += followed.drain()
    assert _state(events, state) == {7: "new", 8: "later"}
    followed.die()
    assert followed.drain() == [], "the new identity is recorded"


@PARTITIONS
@pytest.mark.parametrize("restarted", [True, False])
def test_attached_or_detached_partition_stops_the_reader(
    parted: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    if restarted:
        parted.die()
    parted.database.execute(*statements)
    assert "public.parted: partition public.parted_" in _changed(parted)


@PARTITIONS
def test_attached_or_detached_partition_can_take_a_new_snapshot(parted: Follower, statements: tuple[str, ...]) -> None:
    parted.options["onTableChange"] = "snapshot"
    parted.die()
    parted.database.execute(*statements)
    state = _state(parted.drain(), {1: "a"})
    assert state == dict(parted.database.execute("SELECT id, note FROM parted"))


def test_new_empty_partition_is_followed_and_its_removal_is_detected(parted: Follower) -> None:
    parted.database.execute(
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "INSERT INTO parted VALUES (11, 'b')",
    )
    assert _state(parted.drain()) == {11: "b"}
    parted.die()
    parted.database.execute("DROP TABLE parted_1")
    assert "parted_1 was detached or dropped" in _changed(parted)


AWAY_AND_BACK = (
    "ALTER TABLE orders RENAME TO orders_x",
    "INSERT INTO orders_x VALUES (3, 'lost')",
    "ALTER TABLE orders_x RENAME TO orders",
)
SWAP_TWICE = (
    *SWAP,
    "INSERT INTO orders VALUES (9, 'in the other')",
    "INSERT INTO orders_old VALUES (3, 'lost')",
    "BEGIN; ALTER TABLE orders RENAME TO orders_new; ALTER TABLE orders_old RENAME TO orders; COMMIT",
)
PUBLISH_LESS = (
    "ALTER PUBLICATION pub SET (publish = 'insert')",
    "UPDATE orders SET note = 'lost'",
    "ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')",
)
OTHER_KEY = (
    "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (note)",
    "INSERT INTO orders VALUES (3, 'x')",
)
NO_KEY = ("ALTER TABLE orders DROP CONSTRAINT orders_pkey", "INSERT INTO orders VALUES (3, 'x'), (4, 'y')")
NO_KEY_FOR_A_WHILE = (*NO_KEY, "ALTER TABLE orders ADD PRIMARY KEY (id)")
RENAMED_KEY = ("ALTER TABLE orders RENAME COLUMN id TO number", "INSERT INTO orders VALUES (3, 'x')")


@pytest.mark.parametrize(
    "statements",
    [AWAY_AND_BACK, SWAP_TWICE, PUBLISH_LESS, OTHER_KEY, NO_KEY, NO_KEY_FOR_A_WHILE, RENAMED_KEY],
    ids=["away-and-back", "swap-twice", "publish-less", "other-key", "no-key", "no-key-for-a-while", "renamed-key"],
)
@pytest.mark.parametrize("restarted", [True, False])
def test_temporary_change_of_a_postgres_table_stops_the_reader(
    followed: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    if restarted:
        followed.die()
    followed.database.execute(*statements, "INSERT INTO orders VALUES (50, 'after')")
    with pytest.raises((TableChanged, SourceRefused), match=r"public\.orders"):
        followed.drain()


@pytest.mark.parametrize("statements", [AWAY_AND_BACK, SWAP_TWICE, PUBLISH_LESS])
@pytest.mark.parametrize("restarted", [True, False])
def test_temporary_change_of_a_postgres_table_can_take_a_new_snapshot(
    followed: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    followed.options["onTableChange"] = "snapshot"
    followed.die()
    followed.drain()
    if restarted:
        followed.die()
    followed.database.execute(*statements, "INSERT INTO orders VALUES (50, 'after')")
    events = followed.drain()
    events += followed.drain()
    assert len({event["id"] for event in events}) == len(events)
    assert _state(events, {1: "a"}) == dict(followed.database.execute("SELECT id, note FROM orders"))
    followed.database.execute("INSERT INTO orders VALUES (51, 'last')")
    assert 51 in _state(followed.drain())


def test_temporary_schema_move_is_detected(followed: Follower) -> None:
    followed.database.execute("CREATE SCHEMA maint", "ALTER TABLE orders SET SCHEMA maint")
    followed.database.execute("INSERT INTO maint.orders VALUES (3, 'x')", "ALTER TABLE maint.orders SET SCHEMA public")
    assert "under the name maint.orders" in _changed(followed)


@pytest.mark.parametrize("restarted", [True, False])
def test_partition_detached_and_reattached_is_detected(parted: Follower, restarted: bool) -> None:
    if restarted:
        parted.die()
    parted.database.execute(
        DETACH[0],
        "INSERT INTO parted_0 VALUES (3, 'lost')",
        "ALTER TABLE parted ATTACH PARTITION parted_0 FOR VALUES FROM (0) TO (10)",
    )
    assert "was detached and attached again" in _changed(parted)


def test_temporary_publishing_by_partition_is_detected(parted: Follower) -> None:
    parted.database.execute(
        "ALTER PUBLICATION pub SET (publish_via_partition_root = false)",
        "INSERT INTO parted VALUES (2, 'lost')",
        "ALTER PUBLICATION pub SET (publish_via_partition_root = true)",
    )
    assert "public.parted" in _changed(parted)


@pytest.mark.parametrize(
    ("statement", "why"),
    [("ALTER TABLE orders RENAME TO orders_x", "it was renamed to public.orders_x"), ("DROP TABLE orders", "dropped")],
)
def test_removed_listed_postgres_table_stops_the_reader(
    postgres: PostgresDatabase, tmp_path: Path, statement: str, why: str
) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE TABLE kept (id int PRIMARY KEY)")
    for follower in _follow(postgres, tmp_path / "segments", "orders,kept"):
        postgres.execute(statement, "INSERT INTO kept VALUES (1)")
        assert why in _changed(follower)
        follower.die()
        with pytest.raises(SourceRefused, match=r"no table is called orders"):
            follower.drain()


def test_removed_table_is_truncated_and_read_again_when_it_returns(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE TABLE kept (id int PRIMARY KEY)")
    for follower in _follow(postgres, tmp_path / "segments", "?rders,kept", onTableChange="snapshot"):
        postgres.execute("ALTER TABLE orders RENAME TO orders_x")
        assert [(event["op"], event["table"]) for event in follower.drain()] == [("t", "orders")]
        assert follower.drain() == []
        postgres.execute("INSERT INTO orders_x VALUES (2, 'b')", "ALTER TABLE orders_x RENAME TO orders")
        assert _state(follower.drain()) == {1: "a", 2: "b"}


def test_unlogged_table_is_detected(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE TABLE kept (id int PRIMARY KEY)")
    postgres.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    for follower in _follow(postgres, tmp_path / "segments", "*"):
        postgres.execute("ALTER TABLE orders SET UNLOGGED", "INSERT INTO orders VALUES (2, 'lost')")
        assert "UNLOGGED" in _changed(follower)


def test_relation_message_makes_a_running_reader_compare_tables(
    parted: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.planner.IDENTITIES_S", 1e9)
    parted.die()
    assert not parted.plan(), "the comparison at the start finds no change"
    parted.database.execute(*ATTACH, "INSERT INTO parted VALUES (3, 'c')")
    with pytest.raises(TableChanged):
        wait_until(parted.plan, what="the change")


def test_table_that_changes_during_its_snapshot_stops_the_reader(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(ORDERS, "INSERT INTO orders SELECT i, 'a' FROM generate_series(1, 50) i")
    follower = Follower(postgres, tmp_path / "segments", tables="orders", chunkRows="10", onTableChange="snapshot")
    assert follower.plan(10)
    follower.read()
    follower.commit()
    assert follower.plan(10)
    postgres.execute(*SWAP)
    with pytest.raises(TableChanged, match="during a snapshot"):
        follower.read()
    follower.stop()


def test_option_is_checked() -> None:
    good = {"dsn": "postgresql://h/d", "tables": "t", "slot": "s", "publication": "p", "segments": "/nowhere"}
    assert change_options({**good, "onTableChange": "snapshot"}).follow.on_table_change == "snapshot"
    for wrong in ({"onTableChange": "resnapshot"}, {"onTableChange": "snapshot", "snapshot": "never"}):
        with pytest.raises(InvalidChangeOption, match="onTableChange"):
            change_options({**good, **wrong})


# --- MariaDB --------------------------------------------------------------------------------------------------------

MARIADB_CHANGES = pytest.mark.parametrize(
    "statements",
    [
        (*SWAP[:2], "RENAME TABLE orders TO orders_old, orders_new TO orders"),
        (*SWAP[:2], "DROP TABLE orders", "ALTER TABLE orders_new RENAME TO orders"),
        (
            "CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id) "
            "(PARTITION p0 VALUES LESS THAN (100))",
            "INSERT INTO parts VALUES (7, 'new')",
            "ALTER TABLE parts EXCHANGE PARTITION p0 WITH TABLE orders",
        ),
    ],
    ids=["rename", "alter-rename", "exchange"],
)


@pytest.fixture
def in_mariadb(mariadb: MariadbDatabase, tmp_path: Path) -> Iterator[Follower]:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')")
    yield from _follow(mariadb, tmp_path / "segments", "orders")


@MARIADB_CHANGES
@pytest.mark.parametrize("restarted", [True, False])
def test_mariadb_table_change_stops_the_reader(
    in_mariadb: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    if restarted:
        in_mariadb.die()
    in_mariadb.database.execute(*statements)
    assert f"{in_mariadb.database.name}.orders" in _changed(in_mariadb)
    in_mariadb.die()
    _changed(in_mariadb)


@MARIADB_CHANGES
@pytest.mark.parametrize("restarted", [True, False])
def test_mariadb_table_change_can_take_a_new_snapshot(
    in_mariadb: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    in_mariadb.options["onTableChange"] = "snapshot"
    in_mariadb.die()
    in_mariadb.database.execute("INSERT INTO orders VALUES (2, 'b')")
    events = in_mariadb.drain()
    if restarted:
        in_mariadb.die()
    in_mariadb.database.execute(*statements, "INSERT INTO orders VALUES (8, 'later')")
    events += in_mariadb.drain()
    in_mariadb.die()
    in_mariadb.database.execute("UPDATE orders SET note = 'last' WHERE id = 8")
    events += in_mariadb.drain()
    assert len({event["id"] for event in events}) == len(events)
    assert _state(events, {1: "a"}) == {7: "new", 8: "last"}


def test_two_consecutive_mariadb_changes_take_a_snapshot_each(in_mariadb: Follower) -> None:
    in_mariadb.options["onTableChange"] = "snapshot"
    in_mariadb.die()
    swap = (*SWAP[:2], "RENAME TABLE orders TO orders_old, orders_new TO orders")
    in_mariadb.database.execute(*swap, "RENAME TABLE orders TO x, orders_old TO orders")
    assert _state(in_mariadb.drain()) == {1: "a"}
    in_mariadb.database.execute("INSERT INTO orders VALUES (2, 'b')")
    assert [event["op"] for event in in_mariadb.drain()] == ["c"]


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (note(9))",),
        ("ALTER TABLE orders CHANGE id number int",),
        (
            "ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (note(9))",
            "INSERT INTO orders VALUES (3, 'x')",
            "ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (id)",
        ),
    ],
    ids=["replaced", "renamed", "for-a-while"],
)
@pytest.mark.parametrize("restarted", [True, False])
def test_changed_key_of_a_mariadb_table_stops_the_reader(
    in_mariadb: Follower, statements: tuple[str, ...], restarted: bool
) -> None:
    if restarted:
        in_mariadb.die()
    in_mariadb.database.execute(*statements, "INSERT INTO orders VALUES (50, 'after')")
    assert "its key is" in _changed(in_mariadb)


@pytest.mark.parametrize("name", ["mariadb", "postgres"])
def test_listed_table_that_does_not_exist_is_refused(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    database: MariadbDatabase | PostgresDatabase = request.getfixturevalue(name)
    database.execute(ORDERS)
    with pytest.raises(SourceRefused, match="no table is called custmers"):
        Follower(database, tmp_path / "segments", tables="orders,custmers").drain()


def test_removed_listed_mariadb_table_stops_the_reader(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE TABLE kept (id int PRIMARY KEY)")
    for follower in _follow(mariadb, tmp_path / "segments", "orders,kept"):
        mariadb.execute("RENAME TABLE orders TO orders_x", "INSERT INTO kept VALUES (1)")
        _changed(follower)
        follower.die()
        with pytest.raises(SourceRefused, match="no table is called orders"):
            follower.drain()


@pytest.mark.parametrize("name", ["mariadb", "postgres"])
@pytest.mark.parametrize("restarted", [True, False])
def test_changed_key_can_take_a_new_snapshot(
    name: str, restarted: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database: MariadbDatabase | PostgresDatabase = request.getfixturevalue(name)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note varchar(9) NOT NULL)")
    database.execute("INSERT INTO orders VALUES (1, 'a')")
    drop = "DROP PRIMARY KEY" if name == "mariadb" else "DROP CONSTRAINT orders_pkey"
    for follower in _follow(database, tmp_path / "segments", "orders", onTableChange="snapshot"):
        if restarted:
            follower.die()
        database.execute("INSERT INTO orders VALUES (2, 'b')", f"ALTER TABLE orders {drop}, ADD PRIMARY KEY (note)")
        database.execute("INSERT INTO orders VALUES (3, 'c')")
        events = follower.drain()
        events += follower.drain()
        assert _state(events, {1: "a"}) == {1: "a", 2: "b", 3: "c"}
        database.execute("UPDATE orders SET id = 4 WHERE note = 'c'")
        assert [(event["op"], json.loads(event["key"])) for event in follower.drain()] == [("u", {"note": "c"})]
        follower.die()
        assert follower.drain() == []


@pytest.mark.parametrize("name", ["mariadb", "postgres"])
def test_table_removed_from_the_list_may_change(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    database: MariadbDatabase | PostgresDatabase = request.getfixturevalue(name)
    database.execute(ORDERS, "INSERT INTO orders VALUES (1, 'a')", "CREATE TABLE kept (id int PRIMARY KEY, note text)")
    for follower in _follow(database, tmp_path / "segments", "orders,kept"):
        follower.options["tables"] = "kept"
        follower.die()
        database.execute("INSERT INTO kept VALUES (1, 'b')", "ALTER TABLE orders RENAME COLUMN id TO number")
        database.execute("INSERT INTO orders VALUES (2, 'x')", "ALTER TABLE orders RENAME TO other")
        assert _state(follower.drain()) == {1: "b"}
