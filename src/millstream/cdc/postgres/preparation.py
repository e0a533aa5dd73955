"""The look at the database before anything is made, and what is made then: the publication first, the slot after it.

A slot that is older than its publication can never be read past the first change between the two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from millstream.cdc.database import TICK_S
from millstream.cdc.errors import SourceRefused
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.catalog import Connection, FollowedTable, Slot
from millstream.cdc.postgres.connection import Login, quoted
from millstream.cdc.postgres.pgoutput import parse_lsn

_OLDEST = 130_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a source follows, by which publication and slot; ``create``: they are made where they are absent."""

    tables: tuple[str, ...]
    slot: str
    publication: str
    create: bool = False


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """The database as it is."""

    server: str
    database: str
    tables: list[FollowedTable]
    published: dict[str, catalog.Published] | None
    slot: Slot | None


def look(login: Login, wanted: Wanted, *, begun: bool) -> DatabaseFacts:
    """Raises one SourceRefused with everything that stands in the way. Makes nothing.

    ``begun``: a checkpoint goes on, so that the slot must be there already; whether it fits is asked by whoever opens
    it.
    """
    with login.connect() as connection:
        found, problems = _look(connection, wanted, begun=begun)
    if problems:
        heading = f"{login.shown} cannot be followed as it is; nothing was made:"
        raise SourceRefused("\n  ".join([heading, *problems]))
    return found


def _look(connection: Connection, wanted: Wanted, *, begun: bool) -> tuple[DatabaseFacts, list[str]]:
    problems: list[str] = []
    if connection.info.server_version < _OLDEST:
        problems.append("the server is older than 13, the oldest that has pg_current_snapshot(). Upgrade it.")
    [(level,)] = connection.execute("SHOW wal_level").fetchall()
    if level != "logical":
        problems.append(f"wal_level is {level}. Set `wal_level = logical` in its configuration and restart it.")
    [(encoding,)] = connection.execute("SHOW server_encoding").fetchall()
    if encoding == "SQL_ASCII":
        problems.append("its encoding is SQL_ASCII, so nobody knows what its bytes mean. Move it to one in UTF8.")
    [(may,)] = connection.execute(
        "SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user"
    ).fetchall()
    if not may:
        [(user,)] = connection.execute("SELECT quote_ident(current_user)").fetchall()
        problems.append(f"the user has no right to replicate. Run: ALTER ROLE {user} REPLICATION")
    tables = catalog.followed_tables(connection, wanted.tables)
    if not tables:
        problems.append(
            f"no table is called {', '.join(wanted.tables)}. Write schema.table; * and ? stand for anything."
        )
    problems += _without_key(connection, tables)
    shown = catalog.published(connection, wanted.publication)
    slot = catalog.slot_of(connection, wanted.slot)
    problems += _publication_problems(wanted, tables, shown, slot)
    database: str
    [(database,)] = connection.execute("SELECT current_database()::text").fetchall()
    problems += _slot_problems(
        connection, wanted, slot, database, begun=begun, sound=not problems and shown is not None
    )
    system, _ = catalog.server_of(connection)
    return DatabaseFacts(catalog.server_name(system, database), database, tables, shown, slot), problems


def _without_key(connection: Connection, tables: Sequence[FollowedTable]) -> list[str]:
    problems = []
    for table in tables:
        if table.identity == "n":
            why = "its replica identity is NOTHING: once published, updates of it would fail in the application"
            problems.append(f"{table.full_name}: {why}. Run: ALTER TABLE ... REPLICA IDENTITY DEFAULT")
        elif not catalog.key_of(connection, table.oid):
            why = "it has no primary key: once published, updates of it would fail in the application"
            advice = "Add a primary key, or name another unique index by REPLICA IDENTITY USING INDEX"
            problems.append(f"{table.full_name}: {why}. {advice}, or leave it out of tables.")
    return problems


def _publication_problems(
    wanted: Wanted, tables: Sequence[FollowedTable], shown: dict[str, catalog.Published] | None, slot: Slot | None
) -> list[str]:
    name = quoted(wanted.publication)
    if shown is None and slot is not None:
        return [
            f"publication {wanted.publication!r} does not exist, and one that is made now would be younger than slot "
            f"{wanted.slot!r}: what was written between them can never be decoded. "
            f"Run: SELECT pg_drop_replication_slot('{wanted.slot}'), and begin anew; after a first run: "
            "`millstream pipeline reset`."
        ]
    if shown is None:
        if wanted.create:
            return []
        listed = ", ".join(f"{quoted(table.schema)}.{quoted(table.name)}" for table in tables)
        command = f"CREATE PUBLICATION {name} FOR TABLE {listed} WITH (publish_via_partition_root = true)"
        return [f"publication {wanted.publication!r} does not exist. Let it be made (create: true), or run: {command}"]
    missing = [table for table in tables if table.full_name not in shown]
    if not missing or wanted.create:
        return []
    listed = ", ".join(f"{quoted(table.schema)}.{quoted(table.name)}" for table in missing)
    partitioned = any(table.partitioned for table in missing)
    via_root = f"; a partitioned table needs: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)"
    return [
        f"publication {wanted.publication!r} lacks tables. Let them be added (create: true), or run: "
        f"ALTER PUBLICATION {name} ADD TABLE {listed}{via_root if partitioned else ''}"
    ]


def _slot_problems(
    connection: Connection, wanted: Wanted, slot: Slot | None, database: str, *, begun: bool, sound: bool
) -> list[str]:
    if slot is None:
        if begun or wanted.create:
            return []  # a lost slot is told by whoever opens it, with the position that is lost
        command = f"SELECT pg_create_logical_replication_slot('{wanted.slot}', 'pgoutput')"
        return [f"slot {wanted.slot!r} does not exist. Let it be made (create: true), or run: {command}"]
    if slot.plugin != "pgoutput":
        return [f"slot {wanted.slot!r} is of the plugin {slot.plugin!r}, and pgoutput is needed. Name another slot."]
    if slot.database != database:
        return [f"slot {wanted.slot!r} belongs to database {slot.database!r}. Name another slot."]
    if slot.wal_status == "lost" and not begun:
        return [f"slot {wanted.slot!r} is lost: the server has removed log that it needed. Drop it, and begin anew."]
    if not begun and not slot.active and sound:
        return _younger_publication(connection, wanted)
    return []


def _younger_publication(connection: Connection, wanted: Wanted) -> list[str]:
    """Decodes the slot's first transaction, and takes nothing from it: that shows whether the publication was there."""
    try:
        connection.execute(
            "SELECT 1 FROM pg_logical_slot_peek_binary_changes(%s, NULL, 1, 'proto_version', '1', "
            "'publication_names', %s)",
            (wanted.slot, quoted(wanted.publication)),
        ).fetchall()
    except psycopg.errors.UndefinedObject:
        return [
            f"publication {wanted.publication!r} is younger than slot {wanted.slot!r}: what was written between them "
            "can never be decoded. Drop the slot, and let it be made anew, after the publication."
        ]
    except psycopg.errors.ObjectInUse:
        return []  # somebody reads it now: who opens it waits for that
    return []


def make(login: Login, wanted: Wanted, found: DatabaseFacts) -> int:
    """Makes what is absent, where that was asked for; answers where the slot begins. One that somebody reads is waited
    for first: the server may not have noticed yet that its last reader is gone."""
    patience = catalog.wal_sender_timeout_s(login)
    until = time.monotonic() + patience
    with login.connect() as connection:
        while (slot := catalog.slot_of(connection, wanted.slot)) is not None and slot.active:
            if time.monotonic() > until:
                raise catalog.slot_in_use(wanted.slot, f"process {slot.active_pid} of the server reads it", patience)
            time.sleep(TICK_S)
        if wanted.create:
            publish(connection, wanted, found)
        if slot is None:
            [(position,)] = connection.execute(
                "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", (wanted.slot,)
            ).fetchall()
            return parse_lsn(position)
        if slot.confirmed is None:
            raise SourceRefused(f"slot {wanted.slot!r} has no position yet: somebody is making it. Try again.")
        return slot.confirmed


def publish(connection: Connection, wanted: Wanted, found: DatabaseFacts) -> None:
    name = quoted(wanted.publication)
    shown = found.published
    missing = [table for table in found.tables if shown is None or table.full_name not in shown]
    listed = ", ".join(f"{quoted(table.schema)}.{quoted(table.name)}" for table in missing)
    if shown is None:
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {listed} WITH (publish_via_partition_root = true)")
    elif missing:
        connection.execute(f"ALTER PUBLICATION {name} ADD TABLE {listed}")


def drop(login: Login, slot: str) -> bool:
    """Gives the slot up, and with it all log that the server keeps for it. Whether there was one. Raises SourceRefused
    where somebody reads it."""
    with login.connect() as connection:
        if catalog.slot_of(connection, slot) is None:
            return False
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        except psycopg.errors.ObjectInUse as error:
            raise SourceRefused(
                f"slot {slot!r} is in use: {error}. Stop the pipeline that reads it, and then run there: "
                f"SELECT pg_drop_replication_slot('{slot}');"
            ) from error
        return True
