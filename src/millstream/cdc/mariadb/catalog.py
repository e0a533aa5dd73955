"""What the server says of itself: settings, tables and their columns, its log. Questions only, in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from millstream.cdc.errors import PositionLost, SourceRefused
from millstream.cdc.mariadb.binlog import file_at, position_of
from millstream.cdc.mariadb.connection import Connection, MariadbLogin, ask

SETTINGS = (
    *("log_bin", "binlog_format", "binlog_row_image", "binlog_row_metadata", "log_bin_compress", "server_id"),
    *("gtid_domain_id", "log_bin_basename"),
)
_TABLES = (
    "SELECT table_schema, table_name, table_type, engine FROM information_schema.tables "
    "WHERE table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') "
    "AND table_schema NOT IN ('mysql', 'information_schema', 'performance_schema', 'sys') ORDER BY 1, 2"
)
_COLUMNS = (
    "SELECT column_name, data_type, column_type, is_generated, character_set_name, collation_name "
    "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"
)
_KEY = (
    "SELECT column_name FROM information_schema.statistics WHERE table_schema = %s AND table_name = %s "
    "AND index_name = 'PRIMARY' ORDER BY seq_in_index"
)
_CASCADES = (
    "SELECT constraint_schema, table_name, constraint_name FROM information_schema.referential_constraints "
    "WHERE delete_rule IN ('CASCADE', 'SET NULL', 'SET DEFAULT') "
    "OR update_rule IN ('CASCADE', 'SET NULL', 'SET DEFAULT')"
)


@dataclass(frozen=True, slots=True)
class MariadbTable:
    schema: str
    name: str
    versioned: bool
    engine: str

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class MariadbColumn:
    name: str
    type: str
    full_type: str
    generated: bool
    charset: str | None
    collation: str | None


@dataclass(frozen=True, slots=True)
class LogFile:
    name: str
    size: int


def settings(connection: Connection) -> dict[str, str]:
    names = ", ".join(f"'{name}'" for name in SETTINGS)
    return dict(ask(connection, f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})"))


def server_name(found: dict[str, str]) -> str:
    """What tells this server's log from others': positions and GTIDs mean something in it alone."""
    return f"server {found['server_id']}, domain {found['gtid_domain_id']}, log {base_name(found)}"


def base_name(found: dict[str, str]) -> str:
    return PurePosixPath(found.get("log_bin_basename") or "binlog").name


def followed_tables(connection: Connection, patterns: Sequence[str], database: str) -> list[MariadbTable]:
    rows = ask(connection, _TABLES)
    tables = [MariadbTable(schema, name, kind != "BASE TABLE", engine or "") for schema, name, kind, engine in rows]
    return [table for table in tables if matches(table.schema, table.name, patterns, database)]


def matches(schema: str, table: str, patterns: Sequence[str], database: str) -> bool:
    """``orders``, ``shop.orders``, ``shop.*``: a pattern without a dot is about the dsn's database."""
    return any(
        fnmatchcase(f"{schema}.{table}", pattern if "." in pattern else f"{database}.{pattern}") for pattern in patterns
    )


def columns_of(connection: Connection, schema: str, table: str) -> list[MariadbColumn]:
    return [
        MariadbColumn(name, kind, full, generated != "NEVER", charset, collation)
        for name, kind, full, generated, charset, collation in ask(connection, _COLUMNS, (schema, table))
    ]


def key_of(connection: Connection, schema: str, table: str) -> list[str]:
    return [name for (name,) in ask(connection, _KEY, (schema, table))]


def cascades(connection: Connection) -> dict[str, str]:
    """Tables whose rows change with another table's, without a word in the log; and by which constraint."""
    return {f"{schema}.{table}": constraint for schema, table, constraint in ask(connection, _CASCADES)}


def shown_as(columns: Sequence[MariadbColumn]) -> dict[str, str]:
    """What the log does not tell of columns."""
    told = {column.name: column.type for column in columns if column.type in ("uuid", "inet4", "inet6")}
    return {**told, **{column.name: "generated" for column in columns if column.generated}}


def charsets(connection: Connection) -> dict[int, str]:
    """Character sets by the numbers of their collations."""
    rows = ask(
        connection,
        "SELECT id, character_set_name FROM information_schema.collation_character_set_applicability "
        "WHERE id IS NOT NULL",
    )
    return {int(number): name for number, name in rows}


def log_files(connection: Connection) -> list[LogFile]:
    return [LogFile(row[0], int(row[1])) for row in ask(connection, "SHOW BINARY LOGS")]


def exact_position(connection: Connection) -> int:
    """Begins a transaction that sees exactly what the log has up to the answer, and nothing behind it."""
    ask(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    found = {name.lower(): value for name, value in ask(connection, "SHOW STATUS LIKE 'binlog_snapshot%'")}
    file = found.get("binlog_snapshot_file", "")
    if not file:
        raise SourceRefused("the server does not tell where its log is: is log_bin on? Turn it on and restart it.")
    return position_of(file, int(found["binlog_snapshot_position"]))


def log_end(connection: Connection) -> int:
    found = exact_position(connection)
    ask(connection, "ROLLBACK")
    return found


def gtids_at(connection: Connection, base: str, position: int) -> str | None:
    """The last transaction of each domain up to a position; None: the log has no such position."""
    [(found,)] = ask(connection, "SELECT BINLOG_GTID_POS(%s, %s)", file_at(position, base))
    return None if found is None else str(found)


def check_position(connection: Connection, login: MariadbLogin, server: str, position: int, mark: str | None) -> str:
    """Raises PositionLost where what follows ``position`` cannot be had, or is another history; the log's base name.

    ``mark`` are transactions that the log must have before the position; None: not known."""
    found = settings(connection)
    anew = "Begin anew, with a snapshot: `millstream pipeline reset`."
    if server_name(found) != server:
        raise PositionLost(
            f"{login.shown} is another server than before ({server_name(found)}, and the checkpoint is of {server}): "
            f"its positions mean nothing here. Correct the dsn. {anew}"
        )
    base = base_name(found)
    file, place = file_at(position, base)
    files = log_files(connection)
    if file not in [each.name for each in files]:
        oldest = f"the oldest file is {files[0].name}" if files else "it has none at all"
        raise PositionLost(
            f"the checkpoint stands in {file}, which {login.shown} has no more ({oldest}): it was purged, or the log "
            f"was reset. What lies between is lost to this pipeline. {anew} Give binlog_expire_logs_seconds more time."
        )
    gtids = gtids_at(connection, base, position)
    there = set((gtids or "").split(","))
    if gtids is None or not {gtid for gtid in (mark or "").split(",") if gtid} <= there:
        raise PositionLost(
            f"the checkpoint stands at {file}:{place} behind GTID {mark or '?'}, and there {login.shown} has "
            f"{gtids or 'no transaction'}: it was reset, cut off by a crash, or is another server's. {anew}"
        )
    return base
