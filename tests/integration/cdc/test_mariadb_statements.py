"""Statements that replace or truncate a followed table are detected in every spelling. Against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Event, Follower

from millstream.cdc.errors import TableChanged
from millstream.testing import MariadbDatabase
from millstream.testing.databases import MariadbProcess

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, note text, g int DEFAULT 1)"
SET_UP = (
    ORDERS,
    "INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 1)",
    "CREATE TABLE orders_new LIKE orders",
    "INSERT INTO orders_new VALUES (7, 'new', 1)",
)


def _ids(events: list[Event], state: set[int] | None = None) -> set[int]:
    state = set() if state is None else state
    for event in events:
        if event["op"] == "t":
            state.clear()
        elif event["op"] == "d":
            state.discard(json.loads(event["key"])["id"])
        else:
            state.add(json.loads(event["key"])["id"])
    return state


@pytest.fixture
def followed(mariadb: MariadbDatabase, tmp_path: Path) -> Iterator[Follower]:
    mariadb.execute(*SET_UP)
    follower = Follower(mariadb, tmp_path / "segments", tables="orders")
    try:
        assert _ids(follower.drain()) == {1, 2}
        yield follower
    finally:
        follower.stop()


@pytest.mark.parametrize(
    "statements",
    [
        ["SET STATEMENT max_statement_time=10 FOR RENAME TABLE orders TO old, orders_new TO orders"],
        ["SET STATEMENT lock_wait_timeout=10 FOR ALTER TABLE orders RENAME TO old"],
        ["ALTER TABLE`orders`RENAME`old`", "ALTER TABLE`orders_new`RENAME`orders`"],
        [
            "SET sql_mode=ANSI_QUOTES",
            'ALTER TABLE "orders" RENAME TO "old"',
            'ALTER TABLE "orders_new" RENAME "orders"',
        ],
        ["ALTER TABLE orders ADD COLUMN c VARCHAR(9) DEFAULT '# ', RENAME TO old"],
        ["ALTER TABLE orders COMMENT 'a -- b', RENAME TO old"],
        ["ALTER TABLE /*!50100 orders */ RENAME TO old", "RENAME TABLE /*! orders_new */ TO orders"],
        ["RENAME /*!50100 TABLE */ orders TO old, orders_new TO orders"],
        ["EXECUTE IMMEDIATE 'RENAME TABLE orders TO old'"],
        ["ALTER IGNORE TABLE orders ADD UNIQUE (g)"],
        ["ALTER TABLE orders ENGINE=MyISAM"],
    ],
    ids=lambda statements: statements[-1][:40],
)
def test_replaced_table_stops_the_reader(followed: Follower, statements: list[str]) -> None:
    followed.database.execute(*statements)
    with pytest.raises(TableChanged, match="orders"):
        followed.drain()


@pytest.mark.parametrize(
    "statements",
    [
        ["SET STATEMENT lock_wait_timeout=10 FOR TRUNCATE TABLE orders"],
        ["SET STATEMENT lock_wait_timeout=10 FOR DROP TABLE orders", ORDERS],
        ["SET sql_mode=ANSI_QUOTES", f'CREATE OR REPLACE TABLE "orders" {ORDERS.partition("orders")[2]}'],
        ["CREATE OR REPLACE DATABASE `{database}`", "USE `{database}`", ORDERS],
        ["DROP TABLE IF EXISTS /* why */ `orders`", ORDERS],
    ],
    ids=lambda statements: statements[0][:40],
)
def test_emptied_table_is_truncated_in_the_stream(followed: Follower, statements: list[str]) -> None:
    name = followed.database.name
    statements = [statement.replace("{database}", name) for statement in statements]
    followed.database.execute(*statements, "INSERT INTO orders (id, note) VALUES (200, 'z')")
    assert _ids(followed.drain(), {1, 2}) == {200}


def test_statements_about_other_tables_are_ignored(followed: Follower) -> None:
    followed.database.execute(
        "SET STATEMENT max_statement_time=10 FOR RENAME TABLE orders_new TO other",
        "ALTER TABLE`other`RENAME`another`",
        "ALTER TABLE orders COMMENT 'rename to b -- why', ADD COLUMN engine INT",
        "CREATE OR REPLACE VIEW v AS SELECT 1",
        "CREATE OR REPLACE TABLE another (id int)",
        "CREATE SEQUENCE s",
        "TRUNCATE TABLE another",
        "INSERT INTO orders (id) VALUES (3)",
    )
    assert _ids(followed.drain(), {1, 2}) == {1, 2, 3}


def test_database_dropped_while_the_reader_was_stopped_truncates_its_tables(
    mariadb: MariadbDatabase, tmp_path: Path
) -> None:
    mariadb.execute(*SET_UP, f"CREATE DATABASE `{mariadb.name}_2`", f"CREATE TABLE `{mariadb.name}_2`.t (id int KEY)")
    mariadb.execute(f"INSERT INTO `{mariadb.name}_2`.t VALUES (50)")
    follower = Follower(mariadb, tmp_path / "segments", tables=f"{mariadb.name}*.*")
    assert _ids(follower.drain()) == {1, 2, 7, 50}
    follower.die()
    mariadb.execute(f"DROP DATABASE `{mariadb.name}_2`")
    assert [(event["op"], event["table"]) for event in follower.drain()] == [("t", "t")]
    follower.stop()


def test_statements_are_matched_case_insensitively_if_the_server_does(tmp_path: Path) -> None:
    with MariadbProcess({"lower-case-table-names": "1"}) as server:
        database = server.fresh_database()
        database.execute(*SET_UP)
        follower = Follower(database, tmp_path / "segments", tables="Orders")
        assert _ids(follower.drain()) == {1, 2}
        database.execute("TRUNCATE TABLE ORDERS", "INSERT INTO orders VALUES (3, 'c', 1)")
        assert _ids(follower.drain(), {1, 2}) == {3}
        database.execute("RENAME TABLE ORDERS TO Old, orders_new TO Orders")
        with pytest.raises(TableChanged, match="orders"):
            follower.drain()
        follower.stop()


def test_statements_of_a_client_with_another_character_set_concern_the_right_table(
    mariadb: MariadbDatabase, tmp_path: Path
) -> None:
    """The bytes of one name in latin1 are those of another name in UTF-8."""
    mariadb.execute("CREATE TABLE `\u00c3\u00a4` (id int PRIMARY KEY)", "INSERT INTO `\u00c3\u00a4` VALUES (1)")
    follower = Follower(mariadb, tmp_path / "segments", tables="*")
    assert len(follower.drain()) == 1
    with mariadb.connect() as client, client.cursor() as cursor:
        cursor.execute("SET NAMES latin1")
        cursor.execute(b"TRUNCATE TABLE `\xc3\xa4`")
        cursor.execute(b"CREATE TABLE `\xe4` (id int PRIMARY KEY)")
        cursor.execute(b"DROP TABLE `\xe4`")
    assert [(event["op"], event["table"]) for event in follower.drain()] == [
        ("t", "\u00c3\u00a4"),
        ("t", "\u00e4"),
    ]
    follower.stop()
