"""Chunks of a MariaDB snapshot: splits tables, reads a chunk, and records the log position that it includes.

A transaction WITH CONSISTENT SNAPSHOT includes exactly the log up to a position that the server reports. So a
transaction's position decides whether a chunk includes it.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pymysql

from millstream.cdc.errors import SnapshotLost, SourceRefused, SourceUnreachable
from millstream.cdc.identity import full_name
from millstream.cdc.mariadb import binlog, catalog
from millstream.cdc.mariadb.binlog import BinlogColumn, BinlogTable
from millstream.cdc.mariadb.catalog import MariadbColumn, MariadbTable
from millstream.cdc.mariadb.connection import (
    Connection,
    MariadbError,
    MariadbLogin,
    fetch_rows,
    literal,
    quoted,
    raw_rows,
)
from millstream.cdc.mariadb.preparation import column_problem
from millstream.cdc.options import refuse_missing_excluded
from millstream.cdc.segments import Numbers, write_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable

_MAX_ATTEMPTS = 50
_TABLE_ALTERED = frozenset((1412, 1054, 1146, 1213, 1205))
"""Error codes: the table was altered or dropped (1146) between the database snapshot and the read. A later database
snapshot has its new state."""
_NO_TABLE = 1146
_MAX_KEYS_PER_QUERY = 400
"""Maximum number of keys in one query of ``locate``."""

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

_LABEL = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = re.compile(r"'(')|\\(.)", re.DOTALL)
_CONTROLS = {"0": "\0", "n": "\n", "r": "\r"}


def split_tables(connection: Connection, tables: Sequence[MariadbTable], chunk_rows: int) -> list[dict[str, Any]]:
    """Queries the bounds of each table's chunks."""
    planned = []
    for table in tables:
        columns = {column.name: column for column in catalog.columns_of(connection, table.schema, table.name)}
        key = [columns[name] for name in catalog.key_of(connection, table.schema, table.name)]
        ordered = ", ".join(_sort_expression(column) for column in key)
        named = ", ".join(f"{_sort_expression(column)} AS k{at}" for at, column in enumerate(key))
        bound_texts = ", ".join(_bound_text(column, f"k{at}") for at, column in enumerate(key))
        bounds = fetch_rows(
            connection,
            f"SELECT {bound_texts} FROM (SELECT {named}, ROW_NUMBER() OVER (ORDER BY {ordered}) AS place "  # noqa: S608
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


def read_chunk(login: MariadbLogin, path: Path, chunk: ChunkPlan, exclude: frozenset[str]) -> None:
    """Reads a chunk and writes it as a segment. Runs in a task."""
    schema, table = chunk.table["schema"], chunk.table["table"]
    for attempt in range(_MAX_ATTEMPTS):
        with login.connect() as connection:
            position = catalog.exact_position(connection)
            [(ts_ms,)] = fetch_rows(connection, "SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS UNSIGNED)")
            metadata: dict[str, Any] = {
                "snapshot": f"{position}:{position}:",
                "position": position,
                "ts_ms": int(ts_ms),
            }
            body, lengths = bytearray(), array("I")
            try:
                # Takes the metadata lock, which blocks ALTER TABLE. Fails if the table was altered since the snapshot.
                fetch_rows(connection, f"SELECT 1 FROM {_name(schema, table)} LIMIT 1")  # noqa: S608  # quoted
                all_columns = catalog.columns_of(connection, schema, table)
                refuse_missing_excluded(full_name(schema, table), [column.name for column in all_columns], exclude)
                columns = [column for column in all_columns if not column.generated]
                key = catalog.key_of(connection, schema, table)
                _refuse_other_key(chunk, columns)
                metadata["table"] = _table_description(schema, table, columns, key).to_json()
                for row in raw_rows(connection, _select(chunk, columns)):
                    body += row
                    lengths.append(len(row))
            except (pymysql.err.MySQLError, MariadbError) as error:
                code = error.code if isinstance(error, MariadbError) else error.args[0] if error.args else 0
                if code not in _TABLE_ALTERED or attempt == _MAX_ATTEMPTS - 1:
                    raise
                if code != _NO_TABLE or attempt < 3:  # the table may be in the middle of a rename
                    time.sleep(0.05)
                    continue
                metadata.pop("table", None)  # dropped: the chunk has no rows, and the log has the DROP
                body, lengths = bytearray(), array("I")
            except OSError as error:
                raise SourceUnreachable(
                    f"{login.display_address} closed the connection during a chunk: {error}"
                ) from error
            fetch_rows(connection, "ROLLBACK")
        write_segment(path, body, lengths, metadata)
        return


def _refuse_other_key(chunk: ChunkPlan, columns: Sequence[MariadbColumn]) -> None:
    """Chunk bounds are values of the key that the table had when the snapshot was planned."""
    now = {column.name: [column.name, _key_type(column), column.collation] for column in columns}
    if any(now.get(name) != [name, *type_and_collation] for name, *type_and_collation in chunk.table["key"]):
        raise SnapshotLost(
            f"the key of {chunk.table['schema']}.{chunk.table['table']} was renamed or has another type since its "
            "snapshot began. Start over: `millstream pipeline reset`."
        )


def _table_description(schema: str, table: str, columns: Sequence[MariadbColumn], key: Sequence[str]) -> BinlogTable:
    """A table description for the rows of a chunk, whose values are already text."""
    for column in columns:
        problem = column_problem(column)
        if problem:
            raise SourceRefused(f"{schema}.{table}.{column.name}: {problem}, which is not supported. Change its type.")
    described = []
    for column in columns:
        kind = _TYPES.get(column.type, binlog.GEOMETRY)
        charset = column.charset or "binary"
        as_text = column.type if column.type in ("uuid", "inet4", "inet6") else ""
        described.append(BinlogColumn(column.name, kind, 0, charset=charset, catalog_type=as_text))
    names = [column.name for column in columns]
    return BinlogTable(0, schema, table, tuple(described), tuple(names.index(name) for name in key))


def _select(chunk: ChunkPlan, columns: Sequence[MariadbColumn]) -> str:
    by_name = {column.name: column for column in columns}
    key = [(_sort_expression(by_name[name]), kind, collation) for name, kind, collation in chunk.table["key"]]
    where = []
    if chunk.after is not None:
        where.append(_beyond(key, chunk.after, ">"))
    if chunk.upto is not None:
        where.append(f"NOT {_beyond(key, chunk.upto, '>')}")
    expressions = ", ".join(_value_expression(column) for column in columns)
    rows = f"SELECT {expressions} FROM {_name(chunk.table['schema'], chunk.table['table'])}"  # noqa: S608  # quoted
    sort_order = ", ".join(name for name, _, _ in key)
    return f"{rows}{' WHERE ' if where else ''}{' AND '.join(where)} ORDER BY {sort_order}"


def _beyond(key: Sequence[tuple[str, str, str | None]], bound: Sequence[str], sign: str) -> str:
    """An SQL condition for keys after the bound. Written out because (a, b) > (x, y) does not use an index."""
    alternatives, equal_prefix = [], ""
    for (name, kind, _), value in zip(key, bound, strict=True):
        constant = _literal(kind, value)
        alternatives.append(f"{equal_prefix}{name} {sign} {constant}")
        equal_prefix += f"{name} = {constant} AND "
    return "(" + " OR ".join(f"({alternative})" for alternative in alternatives) + ")"


def _value_expression(column: MariadbColumn) -> str:
    """An SQL expression for the text to which ``values`` converts the column in the log."""
    name = quoted(column.name)
    if column.type in ("float", "double"):
        return f"{name} * 1e0"  # all digits: the server prints fewer for FLOAT and DOUBLE(m, d)
    if column.type in ("bit", "year") or "zerofill" in column.full_type:
        return f"{name} + 0"
    if column.type in _BINARY or _TYPES.get(column.type) is None:
        return f"CONCAT('0x', LOWER(HEX({name})))"
    if column.type in ("uuid", "inet4", "inet6"):
        return f"CAST({name} AS CHAR)"
    return name


def _sort_expression(column: MariadbColumn) -> str:
    """The expression by which rows are sorted and compared. An enum sorts by number but compares by text, so both use
    the number."""
    name = quoted(column.name)
    if column.type in ("enum", "set", "bit", "year"):
        return f"({name} + 0)"
    return f"({name} * 1e0)" if column.type in ("float", "double") else name


def _bound_text(column: MariadbColumn, name: str) -> str:
    """A bound as text from which ``_literal`` builds the same value."""
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
    """Queries which chunk each key belongs to, because only the server has its collations. Runs in a task."""
    count = len(keys[0])
    if not table.bounds:
        return np.zeros(count, dtype=np.int64)
    columns = [f"k{at}" for at in range(len(table.key))]
    chunks = np.zeros(count, dtype=np.int64)
    rows = list(zip(*(key.to_pylist() for key in keys), strict=True))
    with login.connect() as connection:
        enums = _enum_labels(connection, table)
        bounds = _union_of_rows([_typed_constants(table, bound) for bound in table.bounds], columns)
        is_after = _beyond_columns(columns)
        for first in range(0, count, _MAX_KEYS_PER_QUERY):
            batch = [
                _typed_constants(table, _as_bounds(table, row, enums))
                for row in rows[first : first + _MAX_KEYS_PER_QUERY]
            ]
            counts = fetch_rows(
                connection,
                f"SELECT a.place, COUNT(b.place) FROM ({_union_of_rows(batch, columns)}) AS a "  # noqa: S608  # quoted
                f"LEFT JOIN ({bounds}) AS b ON {is_after} GROUP BY a.place",
            )
            for ordinal, chunk in counts:
                chunks[first + int(ordinal)] = int(chunk)
    return chunks


def _union_of_rows(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    def row(place: int, values: Sequence[str]) -> str:
        named = ", ".join(f"{value} AS {name}" for value, name in zip(values, columns, strict=True))
        return f"SELECT {place} AS place, {named}"

    return " UNION ALL ".join(row(place, values) for place, values in enumerate(rows))


def _beyond_columns(columns: Sequence[str]) -> str:
    alternatives, equal_prefix = [], ""
    for name in columns:
        alternatives.append(f"({equal_prefix}a.{name} > b.{name})")
        equal_prefix += f"a.{name} = b.{name} AND "
    return "(" + " OR ".join(alternatives) + ")"


def _typed_constants(table: SeenTable, values: Sequence[Any]) -> list[str]:
    expressions = []
    for (_, kind, collation), value in zip(table.key, values, strict=True):
        if kind.startswith("text:"):
            expressions.append(f"CONVERT({literal(value)} USING {kind[5:]}) COLLATE {collation}")
        else:
            expressions.append(_literal(kind, value))
    return expressions


def _as_bounds(table: SeenTable, values: Sequence[str], enums: dict[str, list[str]]) -> list[str]:
    """Key values from the log in the form of bounds: bytes without 0x, enum labels as numbers."""
    texts = []
    for (name, kind, _), value in zip(table.key, values, strict=True):
        if name in enums:
            labels = enums[name]
            if labels[0] == "set":
                texts.append(str(sum(1 << labels.index(part, 1) - 1 for part in value.split(",") if part)))
            else:
                texts.append(str(labels.index(value, 1) if value else 0))
        else:
            texts.append(value.removeprefix("0x") if kind == "binary" else value)
    return texts


def _enum_labels(connection: Connection, table: SeenTable) -> dict[str, list[str]]:
    """For each enum or set in the key: the type, then its labels."""
    labels = {}
    for column in catalog.columns_of(connection, table.schema, table.table):
        if column.type in ("enum", "set") and column.name in [name for name, _, _ in table.key]:
            labels[column.name] = [column.type, *listed_labels(column.full_type)]
    return labels


def listed_labels(full_type: str) -> list[str]:
    """The labels in the type of an enum or set, as information_schema has it: the server doubles quotes, and writes
    backslashes and some control characters with a backslash."""
    return [_ESCAPED.sub(_unescaped, label) for label in _LABEL.findall(full_type)]


def _unescaped(match: re.Match[str]) -> str:
    return match[1] or _CONTROLS.get(match[2], match[2])


def _name(schema: str, table: str) -> str:
    return f"{quoted(schema)}.{quoted(table)}"
