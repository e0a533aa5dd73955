"""Checks a server before it is followed. Creates nothing: MariaDB does not store a position for a reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.cdc.errors import SourceRefused
from millstream.cdc.identity import full_name
from millstream.cdc.mariadb import catalog
from millstream.cdc.mariadb.binlog import CHARSETS
from millstream.cdc.mariadb.catalog import MariadbColumn, MariadbTable
from millstream.cdc.mariadb.connection import Connection, MariadbLogin, fetch_rows
from millstream.cdc.options import excluded_key_problems, missing_table_problems, unmatched_exclude_problems

_REQUIRED_SETTINGS = {
    "log_bin": ("ON", "Set `log_bin` in its configuration and restart it."),
    "binlog_format": ("ROW", "Run: SET GLOBAL binlog_format = ROW, and set it in its configuration."),
    "binlog_row_image": ("FULL", "Run: SET GLOBAL binlog_row_image = FULL, and set it in its configuration."),
    "binlog_row_metadata": ("FULL", "Run: SET GLOBAL binlog_row_metadata = FULL, and set it in its configuration."),
    "log_bin_compress": (
        "OFF",
        "Compressed events are not read. Run: SET GLOBAL log_bin_compress = OFF, and set it in its configuration.",
    ),
}
READABLE = frozenset(
    (
        *("tinyint", "smallint", "mediumint", "int", "bigint", "float", "double", "decimal", "bit", "year"),
        *("date", "time", "datetime", "timestamp", "char", "varchar", "tinytext", "text", "mediumtext", "longtext"),
        *("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "enum", "set", "uuid", "inet4", "inet6"),
        *("geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon"),
        "geometrycollection",
    )
)


@dataclass(frozen=True, slots=True)
class ServerState:
    """The current state of the server."""

    server: str
    base: str
    tables: list[MariadbTable]


def check_server(login: MariadbLogin, tables: Sequence[str], exclude: frozenset[str] = frozenset()) -> ServerState:
    """Returns the state of the server, or raises one SourceRefused with all problems."""
    with login.connect() as connection:
        state, problems = _check(connection, tables, login.database)
        for table in state.tables:
            key = catalog.key_of(connection, table.schema, table.name)
            problems += excluded_key_problems(table.full_name, key, exclude)
        columns = {
            table.full_name: [column.name for column in catalog.columns_of(connection, table.schema, table.name)]
            for table in state.tables
            if exclude
        }
        problems += unmatched_exclude_problems(columns, exclude)
    if problems:
        raise SourceRefused(
            "\n  ".join([f"{login.display_address} cannot be followed in its current state:", *problems])
        )
    return state


def _check(connection: Connection, patterns: Sequence[str], database: str) -> tuple[ServerState, list[str]]:
    problems: list[str] = []
    [(version,)] = fetch_rows(connection, "SELECT VERSION()")
    if "mariadb" not in version.lower():
        problems.append(f"it is {version}, not MariaDB: the format of MySQL's log is not supported.")
    settings = catalog.settings(connection)
    for name, (required, remedy) in _REQUIRED_SETTINGS.items():
        if settings.get(name, "absent").upper() != required:
            problems.append(f"{name} is {settings.get(name, 'not known to it')}, and must be {required}. {remedy}")
    problems += _rights(connection)
    tables = catalog.followed_tables(connection, patterns, database)
    fold_case = catalog.folds_case(connection)
    problems += missing_table_problems(
        patterns,
        lambda pattern: any(
            catalog.matches(table.schema, table.name, [pattern], database, fold_case=fold_case) for table in tables
        ),
    )
    problems += _filters(connection, tables) if not problems else []
    by_cascade = catalog.cascades(connection)
    for table in tables:
        problems += _table_problems(connection, table, by_cascade.get(table.full_name))
    return ServerState(catalog.server_name(settings), catalog.base_name(settings), tables), problems


def _rights(connection: Connection) -> list[str]:
    granted = " ".join(row[0] for row in fetch_rows(connection, "SHOW GRANTS"))
    everywhere = " ".join(re.findall(r"GRANT (.*?) ON \*\.\*", granted))
    missing = [
        right
        for right, names in (
            ("REPLICATION SLAVE", ("REPLICATION SLAVE", "REPLICATION REPLICA")),
            ("BINLOG MONITOR", ("BINLOG MONITOR", "REPLICATION CLIENT")),
        )
        if "ALL PRIVILEGES" not in everywhere and not any(name in everywhere for name in names)
    ]
    if not missing:
        return []
    [(user,)] = fetch_rows(connection, "SELECT CURRENT_USER()")
    name, _, host = user.rpartition("@")
    return [f"the user may not read the log. Run: GRANT {', '.join(missing)} ON *.* TO '{name}'@'{host}'"]


def _filters(connection: Connection, tables: Sequence[MariadbTable]) -> list[str]:
    [status] = fetch_rows(connection, "SHOW MASTER STATUS")
    logged, ignored = ({name for name in part.split(",") if name} for part in status[2:4])
    lost = {table.schema for table in tables if table.schema in ignored or (logged and table.schema not in logged)}
    return [
        f"binlog_do_db or binlog_ignore_db excludes database {name} from the log. Change that setting."
        for name in sorted(lost)
    ]


def refuse_table(connection: Connection, schema: str, name: str) -> None:
    """Checks the current state of a table that the log describes. A table that was dropped since is not checked."""
    requested = full_name(schema, name)
    for table in catalog.followed_tables(connection, ["*.*"], schema):
        if table.full_name == requested:
            problems = _table_problems(connection, table, catalog.cascades(connection).get(requested))
            if problems:
                advice = "Then start over with a snapshot: `millstream pipeline reset`."
                raise SourceRefused("\n  ".join([f"{requested} cannot be followed any more:", *problems, advice]))


def _table_problems(connection: Connection, table: MariadbTable, cascade: str | None) -> list[str]:
    problems = []
    if table.engine.lower() != "innodb":
        why = f"its engine is {table.engine}, which has no transactions"
        problems.append(f"{table.full_name}: {why}. Run: ALTER TABLE ... ENGINE = InnoDB, or remove it from tables.")
    if table.versioned:
        why = "it is system-versioned, and its log mixes rows with their history"
        problems.append(f"{table.full_name}: {why}. Remove it from tables.")
    if cascade is not None:
        why = f"the constraint {cascade} changes its rows with another table's, and the log does not contain that"
        problems.append(
            f"{table.full_name}: {why}. Make the constraint RESTRICT and change the rows in the application, or remove "
            "the table from tables."
        )
    if not catalog.key_of(connection, table.schema, table.name):
        why = "it has no primary key, so a change does not identify its row"
        problems.append(f"{table.full_name}: {why}. Add one, or remove the table from tables.")
    for column in catalog.columns_of(connection, table.schema, table.name):
        problem = column_problem(column)
        if problem:
            advice = "Change its type (ALTER TABLE ... MODIFY), or remove the table from tables."
            problems.append(f"{table.full_name}.{column.name}: {problem}, which is not supported. {advice}")
    return problems


def column_problem(column: MariadbColumn) -> str | None:
    """Why the column's values cannot be read exactly; None if they can."""
    if column.type not in READABLE:
        return f"its type is {column.full_type}"
    if "COMPRESSED" in column.full_type:
        return "it is COMPRESSED"
    if "mariadb-5.3" in column.full_type:
        return "it has the format of MariaDB 5.3"
    if column.full_type.startswith("year(2)"):
        return "it is YEAR(2), whose century is not in the log"
    if column.charset is not None and column.charset not in CHARSETS:
        return f"its character set is {column.charset}"
    return None
