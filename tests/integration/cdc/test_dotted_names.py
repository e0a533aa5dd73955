"""Tables whose dotted names are equal stay different tables. Against real servers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from following import Event, Follower

from millstream.testing import MariadbDatabase, PostgresDatabase


def _rows(events: list[Event], state: dict[tuple[str, str], set[int]] | None = None) -> dict[tuple[str, str], set[int]]:
    state = defaultdict(set) if state is None else state
    for event in events:
        table = (event["schema"] or event["db"], event["table"])
        if event["op"] == "t":
            state[table].clear()
        else:
            state[table].add(json.loads(event["key"])["id"])
    return state


def test_postgres_tables_with_the_same_dotted_name_are_two_tables(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute('CREATE SCHEMA "x.y"', "CREATE SCHEMA x", 'CREATE TABLE "x.y".z (id int PRIMARY KEY)')
    postgres.execute('INSERT INTO "x.y".z VALUES (1)')
    follower = Follower(postgres, tmp_path / "segments", tables="x.*", onTableChange="snapshot")
    state = _rows(follower.drain())
    follower.die()
    postgres.execute('CREATE TABLE x."y.z" (id int PRIMARY KEY)', 'INSERT INTO x."y.z" VALUES (2)')
    _rows(follower.drain(), state)
    postgres.execute('INSERT INTO x."y.z" VALUES (4)', 'INSERT INTO "x.y".z VALUES (3)')
    assert _rows(follower.drain(), state) == {("x.y", "z"): {1, 3}, ("x", "y.z"): {2, 4}}
    postgres.execute('DROP TABLE "x.y".z', 'CREATE TABLE "x.y".z (id int PRIMARY KEY)', 'TRUNCATE x."y.z"')
    assert _rows(follower.drain(), state) == {("x.y", "z"): set(), ("x", "y.z"): set()}
    follower.stop()


def test_dropped_mariadb_database_with_a_dot_empties_its_own_tables(mariadb: MariadbDatabase, tmp_path: Path) -> None:
    short, dotted = f"{mariadb.name}_d", f"{mariadb.name}_d.y"
    mariadb.execute(f"CREATE DATABASE `{short}`", f"CREATE DATABASE `{dotted}`")
    mariadb.execute(f"CREATE TABLE `{dotted}`.z (id int PRIMARY KEY)", f"INSERT INTO `{dotted}`.z VALUES (1)")
    follower = Follower(mariadb, tmp_path / "segments", tables=f"{short}*.*")
    state = _rows(follower.drain())
    mariadb.execute(f"CREATE TABLE `{short}`.`y.z` (id int PRIMARY KEY)", f"INSERT INTO `{short}`.`y.z` VALUES (2)")
    _rows(follower.drain(), state)
    follower.die()
    mariadb.execute(f"INSERT INTO `{short}`.`y.z` VALUES (3)", f"DROP DATABASE `{dotted}`")
    assert _rows(follower.drain(), state) == {(dotted, "z"): set(), (short, "y.z"): {2, 3}}
    follower.stop()
    mariadb.execute(f"DROP DATABASE `{short}`")
