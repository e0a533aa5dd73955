"""Chunks of a snapshot of MariaDB: where tables are cut, and how a chunk is read and told what it saw.

A transaction WITH CONSISTENT SNAPSHOT sees exactly what the log has up to a position that the server tells. A change
behind it was not seen, one before it was: so the place of a transaction in the log is all that is compared.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pymysql

from millstream.cdc.errors import SourceRefused, SourceUnreachable
from millstream.cdc.mariadb import binlog, catalog
from millstream.cdc.mariadb.binlog import BinlogColumn, BinlogTable
from millstream.cdc.mariadb.catalog import MariadbColumn, MariadbTable
from millstream.cdc.mariadb.connection import (
    Connection,
    MariadbError,
    MariadbLogin,
    ask,
    literal,
    quoted,
    raw_rows,
)
from millstream.cdc.mariadb.preparation import column_problem
from millstream.cdc.segments import Numbers, write_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable

_TRIES = 50
_CHANGED = frozenset((1412, 1054, 1146, 1213, 1205))
"""The table was altered between the snapshot and the read (or, 1146, dropped): a later snapshot sees it as it is."""
_NO_TABLE = 1146
_AT_ONCE = 400
"""Keys that are located by one question."""

_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint"), binlog.LONGLONG),
    **dict.fromkeys(("tinytext", "text", "mediumtext", "longtext"), binlog.BLOB),
    **dict.fromkeys(("tinyblob", "blob", "mediumblob", "longblob"), binlog.BLOB),
    "float": binlog.FLOAT,
    "double": binlog.DOUBLE,
    "decimal": binlog.DECIMAL,
    "bit": binlog.BIT,
    "year": binlog.YEAR,
    "date": binlog.DATE,
    "time": binlog.TIME2,
    "datetime": binlog.DATETIME2,
    "timestamp": binlog.TIMESTAMP2,
    "enum": binlog.ENUM,
    "set": binlog.SET,
    "char": binlog.STRING,
    "varchar": binlog.VARCHAR,
    "binary": binlog.STRING,
    "varbinary": binlog.VARCHAR,
    **dict.fromkeys(("uuid", "inet4", "inet6"), binlog.STRING),
}
_BINARY = frozenset(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"))
_NUMBERS = frozenset(("enum", "set", "bit", "year", "tinyint", "smallint", "mediumint", "int", "bigint", "decimal"))


def cut_tables(connection: Connection, tables: Sequence[MariadbTable], chunk_rows: int) -> list[dict[str, Any]]:
    """Asks the server where to cut each table into chunks."""
    planned = []
    for table in tables:
        columns = {column.name: column for column in catalog.columns_of(connection, table.schema, table.name)}
        key = [columns[name] for name in catalog.key_of(connection, table.schema, table.name)]
        ordered = ", ".join(_ordered(column) for column in key)
        named = ", ".join(f"{_ordered(column)} AS k{at}" for at, column in enumerate(key))
        shown = ", ".join(_told(column, f"k{at}") for at, column in enumerate(key))
        bounds = ask(
            connection,
            f"SELECT {shown} FROM (SELECT {named}, ROW_NUMBER() OVER (ORDER BY {ordered}) AS place "  # noqa: S608
            f"FROM {_name(table.schema, table.name)}) AS placed WHERE place MOD {chunk_rows:d} = 0 ORDER BY place",
        )
        planned.append(
            {
                "schema": table.schema,
                "table": table.name,
                "key": [[column.name, _key_type(column), column.collation] for column in key],
                "bounds": [list(bound) for bound in bounds],
                "wide": True,
            }
        )
    return planned


def read_chunk(login: MariadbLogin, path: Path, chunk: ChunkPlan) -> None:
    """In a task."""
    schema, table = chunk.table["schema"], chunk.table["table"]
    for attempt in range(_TRIES):
        with login.connect() as connection:
            position = catalog.exact_position(connection)
            [(ts_ms,)] = ask(connection, "SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)")
            facts: dict[str, Any] = {"snapshot": f"{position}:{position}:", "position": position, "ts_ms": int(ts_ms)}
            body, lengths = bytearray(), array("I")
            try:
                # Takes the lock that keeps a table as it is; had it changed since the snapshot, this would fail.
                ask(connection, f"SELECT 1 FROM {_name(schema, table)} LIMIT 1")  # noqa: S608  # quoted
                columns = [c for c in catalog.columns_of(connection, schema, table) if not c.generated]
                key = catalog.key_of(connection, schema, table)
                facts["table"] = _described(schema, table, columns, key).to_json()
                for row in raw_rows(connection, _select(chunk, columns)):
                    body += row
                    lengths.append(len(row))
            except (pymysql.err.MySQLError, MariadbError) as error:
                code = error.code if isinstance(error, MariadbError) else error.args[0] if error.args else 0
                if code not in _CHANGED or attempt == _TRIES - 1:
                    raise
                if code != _NO_TABLE or attempt < 3:  # at first it may be on its way: a rename, or created anew
                    time.sleep(0.05)
                    continue
                facts.pop("table", None)  # dropped: no rows, and the log says so too
                body, lengths = bytearray(), array("I")
            except OSError as error:
                raise SourceUnreachable(f"{login.shown} went away while a chunk was read: {error}") from error
            ask(connection, "ROLLBACK")
        write_segment(path, body, lengths, facts)
        return


def _described(schema: str, table: str, columns: Sequence[MariadbColumn], key: Sequence[str]) -> BinlogTable:
    """As the log would describe it, as far as the rows of a chunk need it: they are texts already."""
    for column in columns:
        problem = column_problem(column)
        if problem:
            raise SourceRefused(f"{schema}.{table}.{column.name}: {problem}, which is not read. Change its type.")
    told = []
    for column in columns:
        kind = _TYPES.get(column.type, binlog.GEOMETRY)
        charset = column.charset or "binary"
        as_text = column.type if column.type in ("uuid", "inet4", "inet6") else ""
        told.append(BinlogColumn(column.name, kind, 0, charset=charset, shown_as=as_text))
    names = [column.name for column in columns]
    return BinlogTable(0, schema, table, tuple(told), tuple(names.index(name) for name in key))


def _select(chunk: ChunkPlan, columns: Sequence[MariadbColumn]) -> str:
    by_name = {column.name: column for column in columns}
    key = [(_ordered(by_name[name]), kind, collation) for name, kind, collation in chunk.table["key"]]
    where = []
    if chunk.after is not None:
        where.append(_beyond(key, chunk.after, ">"))
    if chunk.upto is not None:
        where.append(f"NOT {_beyond(key, chunk.upto, '>')}")
    shown = ", ".join(_shown(column) for column in columns)
    rows = f"SELECT {shown} FROM {_name(chunk.table['schema'], chunk.table['table'])}"  # noqa: S608  # quoted
    ordered = ", ".join(name for name, _, _ in key)
    return f"{rows}{' WHERE ' if where else ''}{' AND '.join(where)} ORDER BY {ordered}"


def _beyond(key: Sequence[tuple[str, str, str | None]], bound: Sequence[str], sign: str) -> str:
    """The key lies behind the bound. Written out, since the server finds no index for (a, b) > (x, y)."""
    ways, same = [], ""
    for (name, kind, _), value in zip(key, bound, strict=True):
        told = _literal(kind, value)
        ways.append(f"{same}{name} {sign} {told}")
        same += f"{name} = {told} AND "
    return "(" + " OR ".join(f"({way})" for way in ways) + ")"


def _shown(column: MariadbColumn) -> str:
    """The text that a value from the log becomes, too."""
    name = quoted(column.name)
    if column.type in ("float", "double"):
        return f"{name} * 1e0"  # all digits: of a FLOAT and of a DOUBLE(m, d) the server prints fewer
    if column.type in ("bit", "year") or "zerofill" in column.full_type:
        return f"{name} + 0"
    if column.type in _BINARY or _TYPES.get(column.type) is None:
        return f"CONCAT('0x', LOWER(HEX({name})))"
    if column.type in ("uuid", "inet4", "inet6"):
        return f"CAST({name} AS CHAR)"
    return name


def _ordered(column: MariadbColumn) -> str:
    """What rows are ordered and bounded by. An enum sorts by its number and compares by its text: so by its number."""
    name = quoted(column.name)
    if column.type in ("enum", "set", "bit", "year"):
        return f"({name} + 0)"
    return f"({name} * 1e0)" if column.type in ("float", "double") else name


def _told(column: MariadbColumn, name: str) -> str:
    """A bound as a text from which ``_literal`` makes the same value again."""
    if column.type in _BINARY:
        return f"HEX({name})"
    return f"CAST({name} AS CHAR)" if column.type in ("uuid", "inet4", "inet6") else name


def _key_type(column: MariadbColumn) -> str:
    if column.type in _NUMBERS:
        return "number"
    if column.type in ("float", "double"):
        return "double"
    if column.type in _BINARY:
        return "binary"
    if column.type in ("time", "datetime", "timestamp"):
        return "time(6)" if column.type == "time" else "datetime(6)"
    if column.type in ("date", "uuid", "inet4", "inet6"):
        return column.type
    return f"text:{column.charset}"


def _literal(kind: str, value: str) -> str:
    if kind == "number":
        return str(value)
    if kind == "double":
        return f"CAST({literal(str(value))} AS DOUBLE)"
    if kind == "binary":
        return f"X'{value}'"
    if kind.startswith("text:"):
        return literal(value)
    return f"CAST({literal(str(value))} AS {kind})"


def locate(login: MariadbLogin, table: SeenTable, keys: list[pa.Array]) -> Numbers:
    """Asks the server which chunk a key belongs to: its collations decide, never Python's order. In a task."""
    count = len(keys[0])
    if not table.bounds:
        return np.zeros(count, dtype=np.int64)
    columns = [f"k{at}" for at in range(len(table.key))]
    found = np.zeros(count, dtype=np.int64)
    rows = list(zip(*(key.to_pylist() for key in keys), strict=True))
    with login.connect() as connection:
        enums = _labels(connection, table)
        bounds = _listed([_typed(table, bound) for bound in table.bounds], columns)
        behind = _beyond_columns(columns)
        for first in range(0, count, _AT_ONCE):
            some = [_typed(table, _from_log(table, row, enums)) for row in rows[first : first + _AT_ONCE]]
            told = ask(
                connection,
                f"SELECT a.place, COUNT(b.place) FROM ({_listed(some, columns)}) AS a "  # noqa: S608  # quoted
                f"LEFT JOIN ({bounds}) AS b ON {behind} GROUP BY a.place",
            )
            for place, chunk in told:
                found[first + int(place)] = int(chunk)
    return found


def _listed(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    def row(place: int, values: Sequence[str]) -> str:
        named = ", ".join(f"{value} AS {name}" for value, name in zip(values, columns, strict=True))
        return f"SELECT {place} AS place, {named}"

    return " UNION ALL ".join(row(place, values) for place, values in enumerate(rows))


def _beyond_columns(columns: Sequence[str]) -> str:
    ways, same = [], ""
    for name in columns:
        ways.append(f"({same}a.{name} > b.{name})")
        same += f"a.{name} = b.{name} AND "
    return "(" + " OR ".join(ways) + ")"


def _typed(table: SeenTable, values: Sequence[Any]) -> list[str]:
    told = []
    for (_, kind, collation), value in zip(table.key, values, strict=True):
        if kind.startswith("text:"):
            told.append(f"CONVERT({literal(value)} USING {kind[5:]}) COLLATE {collation}")
        else:
            told.append(_literal(kind, value))
    return told


def _from_log(table: SeenTable, values: Sequence[str], enums: dict[str, list[str]]) -> list[str]:
    """Texts of changes as bounds are told: bytes without their 0x, labels as the numbers that they are sorted by."""
    told = []
    for (name, kind, _), value in zip(table.key, values, strict=True):
        if name in enums:
            labels = enums[name]
            if labels[0] == "set":
                told.append(str(sum(1 << labels.index(part, 1) - 1 for part in value.split(",") if part)))
            else:
                told.append(str(labels.index(value, 1) if value else 0))
        else:
            told.append(value.removeprefix("0x") if kind == "binary" else value)
    return told


def _labels(connection: Connection, table: SeenTable) -> dict[str, list[str]]:
    """Of enums and sets in the key: what they are, then their labels."""
    found = {}
    for column in catalog.columns_of(connection, table.schema, table.table):
        if column.type in ("enum", "set") and column.name in [name for name, _, _ in table.key]:
            inside = column.full_type[len(column.type) + 2 : -2]
            found[column.name] = [column.type, *(part.replace("''", "'") for part in inside.split("','"))]
    return found


def _name(schema: str, table: str) -> str:
    return f"{quoted(schema)}.{quoted(table)}"
