"""Read-only queries about the database: tables and their keys, the publication, the replication slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import psycopg

from millstream.cdc.errors import PositionLost, SourceRefused
from millstream.cdc.identity import full_name
from millstream.cdc.postgres.connection import Login
from millstream.cdc.postgres.pgoutput import Column, Relation, format_lsn, kind_of, parse_lsn

Connection = psycopg.Connection[Any]

_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relreplident::text, c.relkind::text, c.relispartition
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%%'
ORDER BY 2, 3
"""
# As JSON, because column lists and row filters exist only since version 15.
_PUBLISHED = "SELECT to_jsonb(p) FROM pg_publication_tables p WHERE pubname = %s"
# With REPLICA IDENTITY USING INDEX the key is that index; otherwise it is the primary key, also with FULL.
_KEY = """
SELECT a.attname::text
FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(attnum, place), pg_attribute a
WHERE i.indrelid = %(table)s AND a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.place <= i.indnkeyatts
  AND (CASE WHEN (SELECT relreplident FROM pg_class WHERE oid = %(table)s) = 'i' THEN i.indisreplident
       ELSE i.indisprimary END)
ORDER BY k.place
"""
_COLUMNS = """
SELECT a.attname::text, a.atttypid::bigint, format_type(a.atttypid, a.atttypmod),
       CASE WHEN a.attcollation <> t.typcollation AND a.attcollation <> 0
            THEN (SELECT quote_ident(n.nspname) || '.' || quote_ident(l.collname)
                  FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace WHERE l.oid = a.attcollation) END
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attnum
"""
_NAMES = "SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped"
# One statement, so that both sides have the same names even if columns are renamed meanwhile. Since version 15 attnames
# has the names of all columns if the publication has no column list.
_SENT = """
SELECT a.attname::text, a.attgenerated = '' AND coalesce(to_jsonb(p) -> 'attnames' ? a.attname::text, true)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_publication_tables p ON p.pubname = %s AND p.schemaname = n.nspname AND p.tablename = c.relname
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
_BASE_TYPES = """
WITH RECURSIVE down(first, oid, base, kind) AS (
  SELECT oid, oid, typbasetype, typtype FROM pg_type WHERE oid = ANY(%s)
  UNION ALL SELECT d.first, t.oid, t.typbasetype, t.typtype FROM down d JOIN pg_type t ON t.oid = d.base)
SELECT first::bigint, oid::bigint FROM down WHERE base = 0
"""
# A partition whose entry in pg_inherits is two commands younger than its row type, in the same transaction, was created
# by CREATE TABLE ... PARTITION OF and has no rows. A partition that was attached later may have rows.
_PARTITIONS = """
SELECT t.root::bigint, c.oid::bigint, c.oid::regclass::text,
       i.xmin = y.xmin AND i.cmin::text::bigint - y.cmin::text::bigint <= 2, i.xmin::text
FROM unnest(%s::oid[]) AS t(root), pg_partition_tree(t.root) AS p
JOIN pg_class c ON c.oid = p.relid JOIN pg_inherits i ON i.inhrelid = c.oid JOIN pg_type y ON y.typrelid = c.oid
WHERE p.level > 0
"""
_ENTRIES = """
SELECT t.oid::bigint, p.oid::bigint || '/' || coalesce((
  SELECT 'table ' || r.oid FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = t.oid), {schema}, 'all')
FROM pg_publication p, pg_class t WHERE p.pubname = %s AND t.oid = ANY(%s)
"""
# A row's xmin is the transaction that wrote it: every ALTER PUBLICATION ... SET (...) writes another row.
_OPTIONS = "SELECT xmin::text FROM pg_publication WHERE pubname = %s"
_NOW = """
SELECT c.oid::bigint, n.nspname || '.' || c.relname, c.relpersistence::text, c.relispartition
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s)
"""
_BY_SCHEMA = (
    "(SELECT 'schema ' || n.oid FROM pg_publication_namespace n WHERE n.pnpubid = p.oid AND n.pnnspid = t.relnamespace)"
)
_SCHEMAS_SINCE = 150_000
CHANGE_KINDS = ("insert", "update", "delete", "truncate")
_SLOT = """
SELECT plugin::text, database::text, confirmed_flush_lsn::text, active, active_pid, wal_status::text,
       pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint
FROM pg_replication_slots WHERE slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """A table that matches the options. ``identity`` is its replica identity: d, n, f or i."""

    oid: int
    schema: str
    name: str
    identity: str
    partitioned: bool
    partition: bool

    @property
    def full_name(self) -> str:
        return full_name(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column, as the catalog has it now."""

    name: str
    type: int
    type_name: str
    collation: str | None
    """None: the type's default collation."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication. ``tables``: their full names with their row filters. ``unpublished``: kinds of changes that it
    excludes."""

    tables: dict[str, str | None]
    unpublished: tuple[str, ...]
    via_root: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """The state of a replication slot."""

    plugin: str
    database: str
    confirmed: int | None
    active: bool
    active_pid: int | None
    wal_status: str | None
    held_bytes: int | None
    """Bytes of WAL that the server keeps for the slot."""


def followed_tables(connection: Connection, patterns: Sequence[str]) -> list[FollowedTable]:
    """The tables that match the patterns. Partitions are followed through their root table."""
    rows = connection.execute(_TABLES).fetchall()
    tables = [
        FollowedTable(oid, schema, name, identity, kind == "p", partition)
        for oid, schema, name, identity, kind, partition in rows
    ]
    return [table for table in tables if not table.partition and matches(table.schema, table.name, patterns)]


def matches(schema: str, table: str, patterns: Sequence[str]) -> bool:
    """Whether a table matches ``orders``, ``shop.orders`` or ``shop.*``. A pattern without a dot means ``public``."""
    return any(fnmatchcase(f"{schema}.{table}", _full(pattern)) for pattern in patterns)


def _full(pattern: str) -> str:
    return pattern if "." in pattern else f"public.{pattern}"


def published(connection: Connection, publication: str) -> dict[str, str | None] | None:
    """The tables of a publication by their full names, with their row filters; None if there is no such publication."""
    if not connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,)).fetchall():
        return None
    rows = [row for (row,) in connection.execute(_PUBLISHED, (publication,)).fetchall()]
    return {full_name(row["schemaname"], row["tablename"]): row.get("rowfilter") for row in rows}


def publication_of(connection: Connection, name: str) -> Publication | None:
    tables = published(connection, name)
    if tables is None:
        return None
    [(via_root, *kinds)] = connection.execute(
        "SELECT pubviaroot, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = %s",
        (name,),
    ).fetchall()
    unpublished = [kind for kind, is_published in zip(CHANGE_KINDS, kinds, strict=True) if not is_published]
    return Publication(tables, tuple(unpublished), via_root)


def generated_key_columns(connection: Connection, table: int) -> list[str]:
    key = key_of(connection, table)
    logged = {column.name for column in columns_of(connection, table)}
    return [name for name in key if name not in logged]


def identities_of(
    connection: Connection, tables: Sequence[FollowedTable], publication: str
) -> dict[str, dict[str, Any]]:
    """The identity of each table by its full name, in the form of ``millstream.cdc.identity``."""
    oids = [table.oid for table in tables]
    published_tables = published(connection, publication) or {}
    by_schema = _BY_SCHEMA if connection.info.server_version >= _SCHEMAS_SINCE else "NULL"
    entries = dict(connection.execute(_ENTRIES.format(schema=by_schema), (publication, oids)).fetchall())
    options = [version for (version,) in connection.execute(_OPTIONS, (publication,)).fetchall()]
    partitions: dict[int, dict[str, str]] = {oid: {} for oid in oids}
    attached: dict[int, dict[str, str]] = {oid: {} for oid in oids}
    empty: dict[int, list[str]] = {oid: [] for oid in oids}
    roots = [table.oid for table in tables if table.partitioned]
    for root, oid, name, created, by in connection.execute(_PARTITIONS, (roots,)).fetchall():
        partitions[root][str(oid)] = name
        attached[root][str(oid)] = by
        if created:
            empty[root].append(str(oid))
    return {
        table.full_name: {
            "schema": table.schema,
            "table": table.name,
            "oid": table.oid,
            "published": entries.get(table.oid) if table.full_name in published_tables else None,
            "options": options[0] if options else None,
            "partitions": partitions[table.oid],
            "attached": attached[table.oid],
            "empty": empty[table.oid],
            "keys": [list(key_of(connection, table.oid))],
        }
        for table in tables
    }


def removed_tables(
    connection: Connection, removed: Mapping[str, dict[str, Any]], patterns: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Identities with the reason ``left`` for tables that are no longer followed. A dropped table is included only if
    the patterns name it, because a glob does not require a table to exist."""
    now = {
        row[0]: row[1:] for row in connection.execute(_NOW, ([table["oid"] for table in removed.values()],)).fetchall()
    }
    result = {}
    for name, identity in removed.items():
        if identity["oid"] in now:
            current, persistence, partition = now[identity["oid"]]
            why = f"it was renamed to {current}"
            if persistence != "p":
                why = "it was set UNLOGGED, so its changes are no longer in the log"
            elif partition:
                why = f"it became a partition of a different table, with the name {current}"
            result[name] = {**identity, "left": why}
        elif f"{identity['schema']}.{identity['table']}" in [_full(pattern) for pattern in patterns]:
            result[name] = {**identity, "left": "it was dropped"}
    return result


def key_of(connection: Connection, table: int) -> tuple[str, ...]:
    return tuple(name for (name,) in connection.execute(_KEY, {"table": table}).fetchall())


def is_key_deferrable(connection: Connection, table: int) -> bool:
    """Whether the primary key is DEFERRABLE. Such a key cannot identify rows in the log."""
    return bool(
        connection.execute(
            "SELECT 1 FROM pg_index WHERE indrelid = %s AND indisprimary AND NOT indimmediate", (table,)
        ).fetchall()
    )


def columns_of(connection: Connection, table: int) -> list[TableColumn]:
    return [TableColumn(*row) for row in connection.execute(_COLUMNS, (table,)).fetchall()]


def column_names(connection: Connection, table: int) -> list[str]:
    """All columns, also generated ones."""
    return [name for (name,) in connection.execute(_NAMES, (table,)).fetchall()]


def sent_columns(connection: Connection, publication: str, table: int) -> dict[str, bool]:
    """All current columns with whether the publication sends each: not generated, and in its column list if it has one.
    Empty if the publication does not include the table."""
    return dict(connection.execute(_SENT, (publication, table)).fetchall())


def base_types(connection: Connection, types: Sequence[int]) -> dict[int, int]:
    """The base type of each domain, at any depth; every other type maps to itself."""
    return dict(connection.execute(_BASE_TYPES, (list(types),)).fetchall())


def relation_of(connection: Connection, table: FollowedTable, columns: list[TableColumn]) -> Relation:
    """The table as a relation message would describe it now."""
    key = frozenset(key_of(connection, table.oid))
    bases = base_types(connection, [column.type for column in columns])
    described = tuple(Column(c.name, c.type, c.name in key, kind_of(bases.get(c.type, c.type))) for c in columns)
    return Relation(table.oid, table.schema, table.name, table.identity, described)


def complete_relation(connection: Connection, relation: Relation, keys: Sequence[Sequence[str]]) -> Relation:
    """Adds facts from the catalog to a relation message. ``keys``: the recorded keys of the table.

    With REPLICA IDENTITY FULL the message does not contain the key, and the catalog has the current key. If the table
    was dropped or a column was renamed since the message was written, a recorded key is used.
    """
    key: Sequence[str] = ()
    if relation.identity == "f":
        columns = {column.name for column in relation.columns}
        possible = [key_of(connection, relation.id), *reversed(keys)]
        key = next((names for names in possible if names and columns.issuperset(names)), ())
        if not key:
            raise SourceRefused(
                f"{relation.schema}.{relation.table} has REPLICA IDENTITY FULL, so the log does not contain its key, "
                "and its current key is not among the columns that it had then. Start over with a snapshot: "
                "`millstream pipeline reset`."
            )
    return relation.with_catalog(frozenset(key), base_types(connection, [column.type for column in relation.columns]))


def slot_of(connection: Connection, name: str) -> Slot | None:
    row = connection.execute(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    plugin, database, confirmed, active, pid, status, held = row
    return Slot(plugin, database, None if confirmed is None else parse_lsn(confirmed), active, pid, status, held)


def server_of(connection: Connection) -> tuple[str, str]:
    """The server's system identifier, and the database's name."""
    row = connection.execute("SELECT system_identifier::text, current_database()::text FROM pg_control_system()")
    [identity] = row.fetchall()
    return identity[0], identity[1]


def server_name(system: str, database: str) -> str:
    return f"{system}/{database}"


def require_same_server(expected: str, system: str, database: str, login: Login) -> None:
    if expected != server_name(system, database):
        raise PositionLost(
            f"{login.display_address} is another server or database than before: it is "
            f"{server_name(system, database)}, and the checkpoint is of {expected}, so the checkpoint's position is "
            "not valid here. Correct the dsn, or start over: `millstream pipeline reset`."
        )


def check_position(login: Login, slot: str, position: int) -> None:
    """Raises PositionLost if the slot cannot send the log after ``position``."""
    with login.connect() as connection:
        state, end = slot_of(connection, slot), flushed_position(connection)
    refuse_older_log(login, position, end)
    refuse_gap(slot, state, position)


def refuse_older_log(login: Login, position: int, end: int) -> None:
    """Raises PositionLost if the server's log ends before ``position``. Pure.

    The server would silently skip the transactions that it writes until its log reaches the position.
    """
    if end < position:
        raise PositionLost(
            f"the log of {login.display_address} ends at {format_lsn(end)}, before the checkpoint's "
            f"{format_lsn(position)}: the server was restored from a backup, or replaced by a replica that had not "
            "received everything. Rows that were sent since then may not exist any more. Start over with a snapshot: "
            "`millstream pipeline reset`."
        )


def refuse_gap(slot: str, state: Slot | None, position: int) -> None:
    """Raises PositionLost if changes after ``position`` are missing from the slot. Pure.

    A slot ahead of the checkpoint was advanced by another reader, or dropped and created again.
    """
    advice = (
        "The changes between the two positions are lost to this pipeline. Start over with a snapshot: "
        "`millstream pipeline reset`."
    )
    if state is None:
        raise PositionLost(
            f"slot {slot!r} does not exist any more, and the checkpoint needs the log from {format_lsn(position)} on. "
            "These changes are lost to this pipeline. Start over with a snapshot: `millstream pipeline reset`."
        )
    if state.wal_status == "lost":
        why = "the server has removed log that it needed (max_slot_wal_keep_size)"
        raise PositionLost(f"slot {slot!r} is lost: {why}. {advice}")
    if state.confirmed is not None and state.confirmed > position:
        raise PositionLost(
            f"slot {slot!r} is at {format_lsn(state.confirmed)}, ahead of the checkpoint's {format_lsn(position)}: "
            f"another reader advanced it, or it was dropped and created again. {advice}"
        )


def slot_in_use(slot: str, why: str, waited_s: float) -> SourceRefused:
    return SourceRefused(
        f"slot {slot!r} is in use: {why}. Waited for wal_sender_timeout ({waited_s:.0f} s). A slot has one reader: "
        "stop the other reader, or name another slot."
    )


def flushed_position(connection: Connection) -> int:
    """The position up to which the log is flushed and can be decoded."""
    [(text,)] = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
    return parse_lsn(text)


def wal_sender_timeout_s(login: Login) -> float:
    with login.connect() as connection:
        [(setting,)] = connection.execute(
            "SELECT setting::bigint FROM pg_settings WHERE name = 'wal_sender_timeout'"
        ).fetchall()
    return float(setting) / 1000 if setting else 60.0
