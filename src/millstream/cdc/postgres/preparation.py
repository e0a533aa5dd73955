"""Checks the database before anything is created, and then creates the publication first and the slot after it.

A slot that is older than its publication cannot be read beyond the first change between the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psycopg
import psycopg.sql

from millstream.cdc.database import POLL_S
from millstream.cdc.errors import SourceRefused
from millstream.cdc.options import excluded_key_problems, missing_table_problems, unmatched_exclude_problems
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.catalog import Connection, FollowedTable, Slot
from millstream.cdc.postgres.connection import Login, quoted
from millstream.cdc.postgres.pgoutput import parse_lsn

_OLDEST = 130_000


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """The followed tables, publication and slot of a source. ``create``: create missing objects. ``exclude``: columns
    that must not leave the database, as schema.table.column."""

    tables: tuple[str, ...]
    slot: str
    publication: str
    create: bool = False
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The current state of the database."""

    server: str
    database: str
    tables: list[FollowedTable]
    published: dict[str, str | None] | None
    slot: Slot | None


def check_database(login: Login, config: SlotConfig, *, resuming: bool) -> DatabaseState:
    """Returns the state of the database, or raises one SourceRefused with all problems. Creates nothing.

    ``resuming``: there is a checkpoint, so a missing or lost slot is not reported here: the session reports it with the
    lost position when it opens the slot.
    """
    with login.connect() as connection:
        state, problems = _check(connection, config, resuming=resuming)
    if problems:
        heading = f"{login.display_address} cannot be followed in its current state; nothing was created:"
        raise SourceRefused("\n  ".join([heading, *problems]))
    return state


def _check(connection: Connection, config: SlotConfig, *, resuming: bool) -> tuple[DatabaseState, list[str]]:
    problems: list[str] = []
    if connection.info.server_version < _OLDEST:
        problems.append("the server is older than 13, the oldest that has pg_current_snapshot(). Upgrade it.")
    [(level,)] = connection.execute("SHOW wal_level").fetchall()
    if level != "logical":
        problems.append(f"wal_level is {level}. Set `wal_level = logical` in its configuration and restart it.")
    [(encoding,)] = connection.execute("SHOW server_encoding").fetchall()
    if encoding == "SQL_ASCII":
        problems.append("its encoding is SQL_ASCII, so its text cannot be decoded. Convert the database to UTF8.")
    [(may_replicate,)] = connection.execute(
        "SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user"
    ).fetchall()
    if not may_replicate:
        [(user,)] = connection.execute("SELECT quote_ident(current_user)").fetchall()
        problems.append(f"the user lacks the REPLICATION attribute. Run: ALTER ROLE {user} REPLICATION")
    tables = catalog.followed_tables(connection, config.tables)
    problems += missing_table_problems(
        config.tables, lambda pattern: any(catalog.matches(table.schema, table.name, [pattern]) for table in tables)
    )
    problems += _without_key(connection, tables)
    for table in tables:
        problems += excluded_key_problems(table.full_name, catalog.key_of(connection, table.oid), config.exclude)
    columns = {table.full_name: catalog.column_names(connection, table.oid) for table in tables if config.exclude}
    problems += unmatched_exclude_problems(columns, config.exclude)
    publication = catalog.publication_of(connection, config.publication)
    published = None if publication is None else publication.tables
    slot = catalog.slot_of(connection, config.slot)
    if publication is not None:
        problems += _unsuitable_publication(config, tables, publication)
    problems += _publication_problems(config, tables, published, slot)
    database: str
    [(database,)] = connection.execute("SELECT current_database()::text").fetchall()
    problems += _slot_problems(
        connection, config, slot, database, resuming=resuming, can_peek=not problems and published is not None
    )
    system, _ = catalog.server_of(connection)
    return DatabaseState(catalog.server_name(system, database), database, tables, published, slot), problems


def unsent_columns(connection: Connection, config: SlotConfig, table: int, logged: Collection[str]) -> set[str]:
    """The table's current columns that its relation message omits: generated columns, and columns that are not in the
    publication's column list. Queried only if exclude names columns.

    ``logged``: the columns of the relation message. If the table has lost one of them, it was altered after the message
    was written. Its current columns then do not show what the message omits, and the result is empty.
    """
    if not config.exclude:
        return set()
    columns = catalog.sent_columns(connection, config.publication, table)
    if not columns.keys() >= set(logged):
        return set()
    return {name for name, sent in columns.items() if not sent}


def _without_key(connection: Connection, tables: Sequence[FollowedTable]) -> list[str]:
    problems = []
    for table in tables:
        if table.identity == "n":
            why = "its replica identity is NOTHING: once it is published, updates would fail in the application"
            problems.append(f"{table.full_name}: {why}. Run: ALTER TABLE ... REPLICA IDENTITY DEFAULT")
        elif not catalog.key_of(connection, table.oid):
            why = "it has no primary key: once it is published, updates would fail in the application"
            advice = "Add a primary key, or choose a unique index with REPLICA IDENTITY USING INDEX"
            problems.append(f"{table.full_name}: {why}. {advice}, or remove it from tables.")
        elif table.identity == "d" and catalog.is_key_deferrable(connection, table.oid):
            why = "its primary key is DEFERRABLE: once it is published, updates would fail in the application"
            advice = (
                "Run: ALTER TABLE ... REPLICA IDENTITY FULL, or choose a unique index with REPLICA IDENTITY USING INDEX"
            )
            problems.append(f"{table.full_name}: {why}. {advice}, or remove it from tables.")
        elif generated := catalog.generated_key_columns(connection, table.oid):
            why = f"its key has the generated column {', '.join(generated)}, and the log has no generated columns"
            advice = "Choose a different unique index with REPLICA IDENTITY USING INDEX"
            problems.append(f"{table.full_name}: {why}. {advice}, or remove it from tables.")
    return problems


def _unsuitable_publication(
    config: SlotConfig, tables: Sequence[FollowedTable], publication: catalog.Publication
) -> list[str]:
    """Checked before tables are added: changes that the publication excludes would be lost without an error."""
    name, problems = quoted(config.publication), []
    if publication.unpublished:
        problems.append(
            f"publication {config.publication!r} excludes {', '.join(publication.unpublished)}: such changes would "
            f"be lost. Run: ALTER PUBLICATION {name} SET (publish = '{', '.join(catalog.CHANGE_KINDS)}')"
        )
    partitioned = [table.full_name for table in tables if table.partitioned]
    if partitioned and not publication.via_root:
        problems.append(
            f"publication {config.publication!r} publishes partitions, but {', '.join(partitioned)} is followed "
            f"through its root. Run: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)"
        )
    return problems


def _publication_problems(
    config: SlotConfig,
    tables: Sequence[FollowedTable],
    published: dict[str, str | None] | None,
    slot: Slot | None,
) -> list[str]:
    name = quoted(config.publication)
    if published is None and slot is not None:
        return [
            f"publication {config.publication!r} does not exist, and a new one would be younger than slot "
            f"{config.slot!r}: changes from before it cannot be decoded. "
            f"Run: SELECT pg_drop_replication_slot('{config.slot}'), and start the pipeline again; if it has run "
            "before, start over: `millstream pipeline reset`."
        ]
    if published is None:
        if config.create:
            return []
        listed = _listed(tables)
        command = f"CREATE PUBLICATION {name} FOR TABLE {listed} WITH (publish_via_partition_root = true)"
        return [f"publication {config.publication!r} does not exist. Set create: true, or run: {command}"]
    missing = [table for table in tables if table.full_name not in published]
    if not missing or config.create:
        return []
    listed = _listed(missing)
    partitioned = any(table.partitioned for table in missing)
    via_root = f"; a partitioned table needs: ALTER PUBLICATION {name} SET (publish_via_partition_root = true)"
    return [
        f"publication {config.publication!r} lacks tables. Set create: true, or run: "
        f"ALTER PUBLICATION {name} ADD TABLE {listed}{via_root if partitioned else ''}"
    ]


def _slot_problems(
    connection: Connection, config: SlotConfig, slot: Slot | None, database: str, *, resuming: bool, can_peek: bool
) -> list[str]:
    if slot is None:
        if not resuming and config.create:
            return _slots_in_use(connection)
        if resuming:
            return []  # the session reports it, with the lost position
        command = f"SELECT pg_create_logical_replication_slot('{config.slot}', 'pgoutput')"
        return [f"slot {config.slot!r} does not exist. Set create: true, or run: {command}"]
    if slot.plugin != "pgoutput":
        return [f"slot {config.slot!r} uses the plugin {slot.plugin!r}, and pgoutput is required. Name another slot."]
    if slot.database != database:
        return [f"slot {config.slot!r} belongs to database {slot.database!r}. Name another slot."]
    if slot.wal_status == "lost" and not resuming:
        return [
            f"slot {config.slot!r} is lost: the server has removed WAL that it needed. Run: SELECT "
            f"pg_drop_replication_slot('{config.slot}'), and start the pipeline again."
        ]
    if not resuming and not slot.active and can_peek:
        return _younger_publication(connection, config)
    return []


def _slots_in_use(connection: Connection) -> list[str]:
    [(used, limit)] = connection.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::bigint"
    ).fetchall()
    if used < limit:
        return []
    return [
        f"all {limit} replication slots of the server are in use. Drop a slot that is no longer needed (see "
        "pg_replication_slots), or increase max_replication_slots and restart the server."
    ]


def _younger_publication(connection: Connection, config: SlotConfig) -> list[str]:
    """Peeks at the slot's first transaction, which fails if the publication did not exist at that point of the log."""
    try:
        connection.execute(
            "SELECT 1 FROM pg_logical_slot_peek_binary_changes(%s, NULL, 1, 'proto_version', '1', "
            "'publication_names', %s)",
            (config.slot, quoted(config.publication)),
        ).fetchall()
    except psycopg.errors.UndefinedObject:
        return [
            f"publication {config.publication!r} is younger than slot {config.slot!r}: changes from before the "
            "publication cannot be decoded. Drop the slot and create it again, after the publication."
        ]
    except psycopg.errors.ObjectInUse:
        return []  # another reader uses the slot; opening it waits for that reader
    return []


def refuse_slot_of_another_checkpoint(
    login: Login, config: SlotConfig, state: DatabaseState, own_id: str | None
) -> None:
    """Raises SourceRefused if the slot belongs to another checkpoint: a new checkpoint would acknowledge changes that
    the other one has not read.

    The comment of the publication names the checkpoint, if the user may set it.
    """
    if state.slot is None:
        return
    with login.connect() as connection:
        comment = _comment(connection, config.publication)
    prefix = _binding(config.slot, "")
    if comment is None or not comment.startswith(prefix) or comment == _binding(config.slot, own_id or "?"):
        return
    raise SourceRefused(
        f"slot {config.slot!r} belongs to another checkpoint ({comment.removeprefix(prefix)}), which would lose "
        "changes. Run the pipeline with that checkpoint, or name another slot. If that checkpoint is gone, run: "
        f"SELECT pg_drop_replication_slot('{config.slot}')"
    )


def _binding(slot: str, checkpoint: str) -> str:
    return f"millstream: slot {slot} belongs to checkpoint {checkpoint}"


def _comment(connection: Connection, publication: str) -> str | None:
    rows = connection.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s", (publication,)
    ).fetchall()
    return rows[0][0] if rows else None


def _bind(connection: Connection, config: SlotConfig, bind: Callable[[], str]) -> None:
    """Stores the checkpoint's id in the publication's comment. Best effort: only the owner of a publication may set its
    comment, and a comment that the user wrote is kept."""
    comment = _comment(connection, config.publication)
    if comment is not None and not comment.startswith("millstream: "):
        return
    text = psycopg.sql.Literal(_binding(config.slot, bind()))
    name = psycopg.sql.Identifier(config.publication)
    try:
        connection.execute(psycopg.sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(name, text))
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction):
        pass


def make(login: Login, config: SlotConfig, state: DatabaseState, *, bind: Callable[[], str]) -> int:
    """Creates the missing objects if the options ask for it, and returns the position of the slot.

    If the slot is in use, waits first: the server may not have noticed yet that its last reader is gone. ``bind``
    returns the id of the checkpoint that the slot belongs to from now on.
    """
    timeout_s = catalog.wal_sender_timeout_s(login)
    deadline = time.monotonic() + timeout_s
    with login.connect() as connection:
        while (slot := catalog.slot_of(connection, config.slot)) is not None and slot.active:
            if time.monotonic() > deadline:
                raise catalog.slot_in_use(config.slot, f"process {slot.active_pid} of the server reads it", timeout_s)
            time.sleep(POLL_S)
        if config.create:
            publish_tables(connection, config, state)
        _bind(connection, config, bind)
        if slot is None:
            [(position,)] = connection.execute(
                "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", (config.slot,)
            ).fetchall()
            return parse_lsn(position)
        if slot.confirmed is None:
            raise SourceRefused(f"slot {config.slot!r} has no position yet: it is being created. Try again.")
        return slot.confirmed


def publish_tables(connection: Connection, config: SlotConfig, state: DatabaseState) -> None:
    name = quoted(config.publication)
    published = state.published
    missing = [table for table in state.tables if published is None or table.full_name not in published]
    listed = _listed(missing)
    if published is None:
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {listed} WITH (publish_via_partition_root = true)")
    elif missing:
        connection.execute(f"ALTER PUBLICATION {name} ADD TABLE {listed}")


def _listed(tables: Sequence[FollowedTable]) -> str:
    """The tables for CREATE or ALTER PUBLICATION. Without ONLY, tables that inherit from them would be published too:
    they do not inherit the primary key, so updates of them would fail in the application."""
    return ", ".join(
        f"{'' if table.partitioned else 'ONLY '}{quoted(table.schema)}.{quoted(table.name)}" for table in tables
    )


def drop(login: Login, slot: str) -> bool:
    """Drops the slot, so that the server no longer keeps WAL for it. Returns False if there was no slot. Raises
    SourceRefused if the slot is in use."""
    with login.connect() as connection:
        if catalog.slot_of(connection, slot) is None:
            return False
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        except psycopg.errors.ObjectInUse as error:
            raise SourceRefused(
                f"slot {slot!r} is in use: {error}. Stop the pipeline that reads it, and then run on the server: "
                f"SELECT pg_drop_replication_slot('{slot}');"
            ) from error
        return True
