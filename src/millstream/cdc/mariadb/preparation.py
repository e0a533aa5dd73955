"""The look at a server before it is followed. Nothing is made in it: MariaDB keeps no place for a reader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.cdc.errors import SourceRefused
from millstream.cdc.mariadb import catalog
from millstream.cdc.mariadb.binlog import CHARSETS
from millstream.cdc.mariadb.catalog import MariadbColumn, MariadbTable
from millstream.cdc.mariadb.connection import Connection, MariadbLogin, ask

_WANTED = {
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
class ServerFacts:
    """The server as it is."""

    server: str
    base: str
    tables: list[MariadbTable]


def look(login: MariadbLogin, tables: Sequence[str]) -> ServerFacts:
    """Raises one SourceRefused with everything that stands in the way."""
    with login.connect() as connection:
        found, problems = _look(connection, tables, login.database)
    if problems:
        raise SourceRefused("\n  ".join([f"{login.shown} cannot be followed as it is; nothing was made:", *problems]))
    return found


def _look(connection: Connection, patterns: Sequence[str], database: str) -> tuple[ServerFacts, list[str]]:
    problems: list[str] = []
    [(version,)] = ask(connection, "SELECT VERSION()")
    if "mariadb" not in version.lower():
        problems.append(f"it is {version}, not MariaDB: MySQL writes its log in other ways, which are not read here.")
    settings = catalog.settings(connection)
    for name, (wanted, remedy) in _WANTED.items():
        if settings.get(name, "absent").upper() != wanted:
            problems.append(f"{name} is {settings.get(name, 'not known to it')}, and must be {wanted}. {remedy}")
    problems += _rights(connection)
    tables = catalog.followed_tables(connection, patterns, database)
    if not tables:
        problems.append(f"no table is called {', '.join(patterns)}. Write database.table; * and ? stand for anything.")
    problems += _filters(connection, tables) if not problems else []
    by_cascade = catalog.cascades(connection)
    for table in tables:
        problems += _table_problems(connection, table, by_cascade.get(table.full_name))
    return ServerFacts(catalog.server_name(settings), catalog.base_name(settings), tables), problems


def _rights(connection: Connection) -> list[str]:
    granted = " ".join(row[0] for row in ask(connection, "SHOW GRANTS"))
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
    [(user,)] = ask(connection, "SELECT CURRENT_USER()")
    name, _, host = user.rpartition("@")
    return [f"the user has no right to read the log. Run: GRANT {', '.join(missing)} ON *.* TO '{name}'@'{host}'"]


def _filters(connection: Connection, tables: Sequence[MariadbTable]) -> list[str]:
    [status] = ask(connection, "SHOW MASTER STATUS")
    wanted, ignored = ({name for name in part.split(",") if name} for part in status[2:4])
    lost = {table.schema for table in tables if table.schema in ignored or (wanted and table.schema not in wanted)}
    return [
        f"binlog_do_db or binlog_ignore_db keeps database {name} out of the log. Take it off the server's list."
        for name in sorted(lost)
    ]


def refuse_table(connection: Connection, schema: str, name: str) -> None:
    """For a table that comes by in the log, as it is now; one that is gone by now is none of our business."""
    full_name = f"{schema}.{name}"
    for table in catalog.followed_tables(connection, ["*.*"], schema):
        if table.full_name == full_name:
            problems = _table_problems(connection, table, catalog.cascades(connection).get(full_name))
            if problems:
                anew = "Then begin anew, with a snapshot: `millstream pipeline reset`."
                raise SourceRefused("\n  ".join([f"{full_name} cannot be followed any more:", *problems, anew]))


def _table_problems(connection: Connection, table: MariadbTable, cascade: str | None) -> list[str]:
    problems = []
    if table.engine.lower() != "innodb":
        why = f"its engine is {table.engine}, whose rows belong to no transaction"
        problems.append(f"{table.full_name}: {why}. Run: ALTER TABLE ... ENGINE = InnoDB, or leave it out of tables.")
    if table.versioned:
        why = "it is system-versioned, and its log mixes rows with their history"
        problems.append(f"{table.full_name}: {why}. Leave it out of tables.")
    if cascade is not None:
        why = f"rows of it change with another table's by the constraint {cascade}, and the log does not tell those"
        problems.append(f"{table.full_name}: {why}. Make it RESTRICT and let the application do it, or leave it out.")
    if not catalog.key_of(connection, table.schema, table.name):
        why = "it has no primary key, so that nobody knows which row a change is about"
        problems.append(f"{table.full_name}: {why}. Add one, or leave it out of tables.")
    for column in catalog.columns_of(connection, table.schema, table.name):
        problem = column_problem(column)
        if problem:
            advice = "Change its type (ALTER TABLE ... MODIFY), or leave the table out of tables."
            problems.append(f"{table.full_name}.{column.name}: {problem}, which is not read. {advice}")
    return problems


def column_problem(column: MariadbColumn) -> str | None:
    """Why its values could not be told exactly."""
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
