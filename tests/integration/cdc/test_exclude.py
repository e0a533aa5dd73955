"""A column that exclude names never leaves the database, however it is spelled or renamed. Against real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from following import Follower

from millstream.cdc.errors import SourceRefused
from millstream.cdc.postgres import preparation
from millstream.testing import MariadbDatabase, PostgresDatabase

PEOPLE = (
    "CREATE TABLE people (id int PRIMARY KEY, email text, note text)",
    "INSERT INTO people VALUES (1, 'a@x', 'n')",
)
BOTH = pytest.mark.parametrize("name", ["postgres", "mariadb"])


def _people(name: str, request: pytest.FixtureRequest) -> tuple[MariadbDatabase | PostgresDatabase, str]:
    database: MariadbDatabase | PostgresDatabase = request.getfixturevalue(name)
    database.execute(*PEOPLE)
    return database, "public" if name == "postgres" else database.name


@BOTH
@pytest.mark.parametrize("column", ["people.emial", "people.Email", "People.email", "other.email", "people.*"])
def test_exclude_of_an_unknown_column_is_refused(
    name: str, column: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database, schema = _people(name, request)
    follower = Follower(database, tmp_path / "segments", tables="people", exclude=f"{schema}.{column}")
    with pytest.raises(SourceRefused, match="no followed table has such a column"):
        follower.drain()
    follower.stop()


@BOTH
@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_excluded_column_that_is_renamed_stops_the_reader(
    name: str, restarted: bool, back: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database, schema = _people(name, request)
    follower = Follower(database, tmp_path / "segments", tables="people", exclude=f"{schema}.people.email")
    assert [json.loads(event["after"]) for event in follower.drain()] == [{"id": 1, "note": "n"}]
    if restarted:
        follower.die()
    database.execute("ALTER TABLE people RENAME COLUMN email TO mail", "INSERT INTO people VALUES (2, 'b@x', 'n')")
    if back:
        database.execute("ALTER TABLE people RENAME COLUMN mail TO email")
    with pytest.raises(SourceRefused, match="exclude names"):
        follower.drain()
    follower.stop()


class _RenamingConnection:
    """Renames the column back as soon as the publication was read, before another statement reads anything else."""

    def __init__(self, connection: Any, database: PostgresDatabase) -> None:
        self._connection = connection
        self._database = database

    def execute(self, query: str, *arguments: Any) -> Any:
        reply = self._connection.execute(query, *arguments)
        if "pg_publication_tables" in query:
            self._database.execute("ALTER TABLE people RENAME COLUMN mail TO email")
        return reply


def test_rename_while_the_catalog_is_read_does_not_send_an_excluded_column(
    postgres: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.execute(*PEOPLE)
    follower = Follower(postgres, tmp_path / "segments", tables="people", exclude="public.people.email")
    follower.drain()
    unsent_columns, calls = preparation.unsent_columns, []

    def unsent_columns_during_a_rename(connection: Any, *arguments: Any) -> set[str]:
        calls.append(arguments)
        return unsent_columns(_RenamingConnection(connection, postgres), *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "unsent_columns", unsent_columns_during_a_rename)
    postgres.execute("ALTER TABLE people RENAME COLUMN email TO mail", "INSERT INTO people VALUES (2, 'b@x', 'n')")
    with pytest.raises(SourceRefused, match="exclude names email"):
        follower.drain()
    assert len(calls) == 1
    follower.stop()


@BOTH
def test_excluded_column_that_is_renamed_during_the_snapshot_stops_the_reader(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database, schema = _people(name, request)
    follower = Follower(database, tmp_path / "segments", tables="people", exclude=f"{schema}.people.email")
    assert follower.plan()
    database.execute("ALTER TABLE people RENAME COLUMN email TO mail")
    with pytest.raises(SourceRefused, match="exclude names email"):
        follower.read()
    follower.stop()


@BOTH
def test_both_names_can_be_excluded_after_a_rename_that_is_followed_by_a_new_column(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database, schema = _people(name, request)
    follower = Follower(database, tmp_path / "segments", tables="people", exclude=f"{schema}.people.email")
    follower.drain()
    database.execute("ALTER TABLE people RENAME COLUMN email TO mail", "ALTER TABLE people ADD COLUMN email text")
    follower.options["exclude"] += f",{schema}.people.mail"
    follower.die()
    database.execute("UPDATE people SET note = 'm', email = 'b@x'")
    [event] = follower.drain()
    assert json.loads(event["after"]) == {"id": 1, "note": "m"}
    follower.stop()


@BOTH
def test_generated_column_can_be_excluded(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    database, schema = _people(name, request)
    database.execute("ALTER TABLE people ADD COLUMN twice int GENERATED ALWAYS AS (id * 2) STORED")
    follower = Follower(database, tmp_path / "segments", tables="people", exclude=f"{schema}.people.twice")
    follower.drain()
    database.execute("UPDATE people SET note = 'm'")
    [event] = follower.drain()
    assert json.loads(event["after"]) == {"id": 1, "email": "a@x", "note": "m"}
    follower.stop()


def test_excluded_column_may_be_absent_from_the_publication(postgres: PostgresDatabase, tmp_path: Path) -> None:
    postgres.execute(*PEOPLE)
    columns = "(id, note)" if int(postgres.execute("SHOW server_version_num")[0][0]) >= 150_000 else ""
    postgres.execute(f"CREATE PUBLICATION pub FOR TABLE people {columns} WITH (publish_via_partition_root = true)")
    follower = Follower(postgres, tmp_path / "segments", tables="people", exclude="public.people.email")
    follower.drain()
    postgres.execute("UPDATE people SET note = 'm'")
    [event] = follower.drain()
    assert json.loads(event["after"]) == {"id": 1, "note": "m"}
    follower.stop()
