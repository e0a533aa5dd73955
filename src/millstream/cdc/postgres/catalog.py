"""What the database says of itself: tables and their keys, the publication, the slot. Questions only, in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import psycopg

from millstream.cdc.errors import PositionLost, SourceRefused
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
# As JSON, because only since version 15 there are lists of columns and filters of rows.
_PUBLISHED = "SELECT to_jsonb(p) FROM pg_publication_tables p WHERE pubname = %s"
# Under an index of its own choice a table is identified by that; else by its primary key, under FULL too.
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
_BASE_TYPES = """
WITH RECURSIVE down(first, oid, base, kind) AS (
  SELECT oid, oid, typbasetype, typtype FROM pg_type WHERE oid = ANY(%s)
  UNION ALL SELECT d.first, t.oid, t.typbasetype, t.typtype FROM down d JOIN pg_type t ON t.oid = d.base)
SELECT first::bigint, oid::bigint FROM down WHERE base = 0
"""
_SLOT = """
SELECT plugin::text, database::text, confirmed_flush_lsn::text, active, active_pid, wal_status::text,
       pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint
FROM pg_replication_slots WHERE slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class FollowedTable:
    oid: int
    schema: str
    name: str
    identity: str
    partitioned: bool
    partition: bool

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class TableColumn:
    name: str
    type: int
    type_name: str
    collation: str | None
    """Where it is not its type's own."""


@dataclass(frozen=True, slots=True)
class Published:
    """What of a table is published: some columns (None: all), some rows."""

    columns: tuple[str, ...] | None
    row_filter: str | None


@dataclass(frozen=True, slots=True)
class Slot:
    plugin: str
    database: str
    confirmed: int | None
    active: bool
    active_pid: int | None
    wal_status: str | None
    held_bytes: int | None
    """How much log the server keeps for it."""


def followed_tables(connection: Connection, patterns: Sequence[str]) -> list[FollowedTable]:
    """The tables that the patterns mean. Partitions are followed through their root."""
    rows = connection.execute(_TABLES).fetchall()
    tables = [
        FollowedTable(oid, schema, name, identity, kind == "p", partition)
        for oid, schema, name, identity, kind, partition in rows
    ]
    return [table for table in tables if not table.partition and matches(table.schema, table.name, patterns)]


def matches(schema: str, table: str, patterns: Sequence[str]) -> bool:
    """``orders``, ``shop.orders``, ``shop.*``: a pattern without a dot is about the schema ``public``."""
    return any(
        fnmatchcase(f"{schema}.{table}", pattern if "." in pattern else f"public.{pattern}") for pattern in patterns
    )


def published(connection: Connection, publication: str) -> dict[str, Published] | None:
    """The tables of a publication by their full names; None where there is no such publication."""
    if not connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (publication,)).fetchall():
        return None
    found = [row for (row,) in connection.execute(_PUBLISHED, (publication,)).fetchall()]
    return {
        f"{row['schemaname']}.{row['tablename']}": Published(
            None if row.get("attnames") is None else tuple(row["attnames"]), row.get("rowfilter")
        )
        for row in found
    }


def key_of(connection: Connection, table: int) -> tuple[str, ...]:
    return tuple(name for (name,) in connection.execute(_KEY, {"table": table}).fetchall())


def columns_of(connection: Connection, table: int) -> list[TableColumn]:
    return [TableColumn(*row) for row in connection.execute(_COLUMNS, (table,)).fetchall()]


def base_types(connection: Connection, types: Sequence[int]) -> dict[int, int]:
    """Of a domain the type that it is made of, however deep; of every other type itself."""
    return dict(connection.execute(_BASE_TYPES, (list(types),)).fetchall())


def relation_of(connection: Connection, table: FollowedTable, columns: list[TableColumn]) -> Relation:
    """The table as a relation message would describe it, now."""
    key = frozenset(key_of(connection, table.oid))
    bases = base_types(connection, [column.type for column in columns])
    told = tuple(Column(c.name, c.type, c.name in key, kind_of(bases.get(c.type, c.type))) for c in columns)
    return Relation(table.oid, table.schema, table.name, table.identity, told)


def completed(connection: Connection, relation: Relation) -> Relation:
    """A relation message with what only the catalog knows."""
    key = frozenset(key_of(connection, relation.id)) if relation.identity == "f" else frozenset()
    return relation.known(key, base_types(connection, [column.type for column in relation.columns]))


def slot_of(connection: Connection, name: str) -> Slot | None:
    row = connection.execute(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    plugin, database, confirmed, active, pid, status, held = row
    return Slot(plugin, database, None if confirmed is None else parse_lsn(confirmed), active, pid, status, held)


def server_of(connection: Connection) -> tuple[str, str]:
    """What tells this server and this database from every other."""
    row = connection.execute("SELECT system_identifier::text, current_database()::text FROM pg_control_system()")
    [found] = row.fetchall()
    return found[0], found[1]


def server_name(system: str, database: str) -> str:
    return f"{system}/{database}"


def same_server(expected: str, system: str, database: str, login: Login) -> None:
    if expected != server_name(system, database):
        raise PositionLost(
            f"{login.shown} is another server or database than before ({server_name(system, database)}, and the "
            f"checkpoint is of {expected}): its positions mean nothing here. Correct the dsn, or begin anew with "
            "`millstream pipeline reset`."
        )


def check_position(login: Login, slot: str, position: int) -> None:
    """Raises PositionLost where the slot cannot give what follows ``position``."""
    with login.connect() as connection:
        found = slot_of(connection, slot)
    refuse_gap(slot, found, position)


def refuse_gap(slot: str, found: Slot | None, position: int) -> None:
    """Pure. A slot that is ahead was acknowledged by another reader, or dropped and made anew: the same to us."""
    anew = "What lies between is lost to this pipeline. Begin anew, with a snapshot: `millstream pipeline reset`."
    if found is None:
        raise PositionLost(
            f"slot {slot!r} does not exist any more; the checkpoint needs it from {format_lsn(position)}. {anew}"
        )
    if found.wal_status == "lost":
        why = "the server has removed log that it needed (max_slot_wal_keep_size)"
        raise PositionLost(f"slot {slot!r} is lost: {why}. {anew}")
    if found.confirmed is not None and found.confirmed > position:
        raise PositionLost(
            f"slot {slot!r} stands at {format_lsn(found.confirmed)}, ahead of the checkpoint's "
            f"{format_lsn(position)}: it was moved by another reader, or dropped and made anew. {anew}"
        )


def slot_in_use(slot: str, why: str, waited_s: float) -> SourceRefused:
    return SourceRefused(
        f"slot {slot!r} is in use: {why}. It was waited for during wal_sender_timeout ({waited_s:.0f} s). A slot has "
        "one reader: stop the other, or name another slot."
    )


def flushed_position(connection: Connection) -> int:
    """How far the log is safe, and so can be decoded."""
    [(text,)] = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
    return parse_lsn(text)


def wal_sender_timeout_s(login: Login) -> float:
    with login.connect() as connection:
        [(setting,)] = connection.execute(
            "SELECT setting::bigint FROM pg_settings WHERE name = 'wal_sender_timeout'"
        ).fetchall()
    return float(setting) / 1000 if setting else 60.0
