"""Read-only queries about the server: settings, tables and their columns, the binary log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from millstream.cdc.errors import PositionLost, SourceRefused
from millstream.cdc.identity import full_name
from millstream.cdc.mariadb.binlog import file_at, position_of
from millstream.cdc.mariadb.connection import Connection, MariadbLogin, fetch_rows

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
        return full_name(self.schema, self.name)


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
    return dict(fetch_rows(connection, f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})"))


def server_name(settings: dict[str, str]) -> str:
    """Identifies this server's log. Positions and GTIDs are valid only in one log."""
    return f"server {settings['server_id']}, domain {settings['gtid_domain_id']}, log {base_name(settings)}"


def base_name(settings: dict[str, str]) -> str:
    return PurePosixPath(settings.get("log_bin_basename") or "binlog").name


def followed_tables(connection: Connection, patterns: Sequence[str], database: str) -> list[MariadbTable]:
    rows = fetch_rows(connection, _TABLES)
    tables = [MariadbTable(schema, name, kind != "BASE TABLE", engine or "") for schema, name, kind, engine in rows]
    fold_case = folds_case(connection)
    return [table for table in tables if matches(table.schema, table.name, patterns, database, fold_case=fold_case)]


def folds_case(connection: Connection) -> bool:
    """Whether the server compares names of databases and tables without regard to case."""
    [(setting,)] = fetch_rows(connection, "SELECT CAST(@@GLOBAL.lower_case_table_names AS CHAR)")
    return bool(setting != "0")


def matches(schema: str, table: str, patterns: Sequence[str], database: str, *, fold_case: bool = False) -> bool:
    """Whether a table matches ``orders``, ``shop.orders`` or ``shop.*``. A pattern without a dot means the dsn's
    database."""
    name = f"{schema}.{table}"
    full_patterns = [pattern if "." in pattern else f"{database}.{pattern}" for pattern in patterns]
    if fold_case:
        name, full_patterns = name.lower(), [pattern.lower() for pattern in full_patterns]
    return any(fnmatchcase(name, pattern) for pattern in full_patterns)


def columns_of(connection: Connection, schema: str, table: str) -> list[MariadbColumn]:
    return [
        MariadbColumn(name, kind, full, generated != "NEVER", charset, collation)
        for name, kind, full, generated, charset, collation in fetch_rows(connection, _COLUMNS, (schema, table))
    ]


def key_of(connection: Connection, schema: str, table: str) -> list[str]:
    return [name for (name,) in fetch_rows(connection, _KEY, (schema, table))]


def identity_of(connection: Connection, table: MariadbTable) -> dict[str, Any]:
    """The table's identity, in the form of ``millstream.cdc.identity``. Statements that replace a table are in the log,
    so only its key is compared."""
    key = key_of(connection, table.schema, table.name)
    names = {"schema": table.schema, "table": table.name, "oid": None, "published": "log", "options": None}
    return {**names, "partitions": {}, "attached": {}, "empty": [], "keys": [key]}


def cascades(connection: Connection) -> dict[str, str]:
    """Tables whose rows are changed by a foreign key's action, without an event, and the constraint."""
    return {full_name(schema, table): constraint for schema, table, constraint in fetch_rows(connection, _CASCADES)}


def catalog_type(columns: Sequence[MariadbColumn]) -> dict[str, str]:
    """Types of columns that the log does not have, by column name."""
    types = {column.name: column.type for column in columns if column.type in ("uuid", "inet4", "inet6")}
    return {**types, **{column.name: "generated" for column in columns if column.generated}}


def charsets(connection: Connection) -> dict[int, str]:
    """Character sets by collation number."""
    rows = fetch_rows(
        connection,
        "SELECT id, character_set_name FROM information_schema.collation_character_set_applicability "
        "WHERE id IS NOT NULL",
    )
    return {int(number): name for number, name in rows}


def log_files(connection: Connection) -> list[LogFile]:
    return [LogFile(row[0], int(row[1])) for row in fetch_rows(connection, "SHOW BINARY LOGS")]


def exact_position(connection: Connection) -> int:
    """Starts a transaction whose snapshot includes exactly the log up to the returned position."""
    fetch_rows(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    status = {name.lower(): value for name, value in fetch_rows(connection, "SHOW STATUS LIKE 'binlog_snapshot%'")}
    file = status.get("binlog_snapshot_file", "")
    if not file:
        raise SourceRefused(
            "the server reports no binlog_snapshot_file. Set log_bin in its configuration and restart it."
        )
    return position_of(file, int(status["binlog_snapshot_position"]))


def log_end(connection: Connection) -> int:
    position = exact_position(connection)
    fetch_rows(connection, "ROLLBACK")
    return position


def gtids_at(connection: Connection, base: str, position: int) -> str | None:
    """The last GTID of each domain up to a position; None if the log has no such position."""
    [(gtids,)] = fetch_rows(connection, "SELECT BINLOG_GTID_POS(%s, %s)", file_at(position, base))
    return None if gtids is None else str(gtids)


def check_position(connection: Connection, login: MariadbLogin, server: str, position: int, gtids: str | None) -> str:
    """Returns the log's base name. Raises PositionLost if the log after ``position`` is gone or has another history.

    ``gtids``: transactions that the log must have before the position; None to skip this check.
    """
    current = settings(connection)
    advice = "Start over with a snapshot: `millstream pipeline reset`."
    if server_name(current) != server:
        raise PositionLost(
            f"{login.display_address} is another server than before: it is {server_name(current)}, and the checkpoint "
            f"is of {server}, so the checkpoint's position is not valid here. Correct the dsn. {advice}"
        )
    base = base_name(current)
    file, offset = file_at(position, base)
    files = log_files(connection)
    if file not in [log_file.name for log_file in files]:
        oldest = f"the oldest file is {files[0].name}" if files else "it has none at all"
        raise PositionLost(
            f"the checkpoint is in {file}, which {login.display_address} no longer has ({oldest}): it was purged, or "
            f"the log was reset. The changes since then are lost to this pipeline. {advice} Increase "
            "binlog_expire_logs_seconds."
        )
    actual_gtids = gtids_at(connection, base, position)
    logged = set((actual_gtids or "").split(","))
    if actual_gtids is None or not {gtid for gtid in (gtids or "").split(",") if gtid} <= logged:
        raise PositionLost(
            f"the checkpoint is at {file}:{offset} after GTID {gtids or '?'}, and at this position "
            f"{login.display_address} has {actual_gtids or 'no transaction'}: the log was reset, truncated by a crash, "
            f"or belongs to another server. {advice}"
        )
    return base
