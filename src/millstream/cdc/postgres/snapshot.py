"""Chunks of a snapshot of Postgres: where tables are cut, and how a chunk is read and told what it saw."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq

from millstream.cdc.errors import SourceRefused
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.catalog import Connection, FollowedTable, Published, TableColumn
from millstream.cdc.postgres.connection import Login, literal, quoted
from millstream.cdc.postgres.pgoutput import parse_lsn
from millstream.cdc.segments import Numbers, write_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable, Snapshot, widened

# Types whose cast to text prints what the type itself prints. Of others (boolean, char(n), inet, ...) it may not.
_CASTS_LIKE_OUTPUT = frozenset(
    (17, 20, 21, 23, 26, 114, 700, 701, 1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802)
)
_TEXTS = frozenset((25, 1043))
_UNSEEN_S = 60.0
_LARGE_BYTES = 8 << 20
_SAMPLED = 1_000
"""Rows of a large table that are looked at for each of its chunks: enough for chunks that differ by some percent, and
little work beside putting all of its keys in order, for which the first row would have to wait."""
_SIZE = """
SELECT coalesce((SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree(%(table)s) WHERE isleaf),
                pg_relation_size(%(table)s))::bigint
"""


def cut_tables(
    connection: Connection,
    tables: Sequence[FollowedTable],
    published: Mapping[str, Published],
    *,
    chunk_rows: int,
    must_see: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Asks the server where to cut each table into chunks. Where does not matter to what is told: each row lies in one
    of them, by the server's own order of keys."""
    planned = []
    for table in tables:
        key = catalog.key_of(connection, table.oid)
        columns = {column.name: column for column in catalog.columns_of(connection, table.oid)}
        described = [[name, columns[name].type_name, columns[name].collation] for name in key]
        names = ", ".join(quoted(name) for name in key)
        [(size,)] = connection.execute(_SIZE, {"table": table.oid}).fetchall()
        rows, every = _looked_at(table, size, chunk_rows)
        bounds = connection.execute(
            f"SELECT {', '.join(quoted(name) + '::text' for name in key)} FROM "  # noqa: S608  # quoted identifiers
            f"(SELECT {names}, row_number() OVER (ORDER BY {names}) AS place FROM {rows}) AS ordered "
            f"WHERE place % {every:d} = 0 ORDER BY place"
        ).fetchall()
        shown = published.get(table.full_name, Published(None, None))
        planned.append(
            {
                "oid": table.oid,
                "schema": table.schema,
                "table": table.name,
                "identity": table.identity,
                "partitioned": table.partitioned,
                "key": described,
                "bounds": [list(bound) for bound in bounds],
                "columns": None if shown.columns is None else list(shown.columns),
                "filter": shown.row_filter,
                "must_see": must_see.get(table.full_name),
            }
        )
    return planned


def _looked_at(table: FollowedTable, size: int, chunk_rows: int) -> tuple[str, int]:
    """The rows whose keys are put in order, as a FROM clause has them, and which of them end a chunk: every nth."""
    if size < _LARGE_BYTES or chunk_rows < 10 * _SAMPLED:
        return _from(table), chunk_rows
    return f"{_from(table)} TABLESAMPLE BERNOULLI ({100 * _SAMPLED / chunk_rows:.6f})", _SAMPLED


def read_chunk(login: Login, path: Path, chunk: ChunkPlan) -> None:
    """In a task."""
    told = chunk.table
    table = FollowedTable(told["oid"], told["schema"], told["table"], told["identity"], told["partitioned"], False)
    until = time.monotonic() + _UNSEEN_S
    with login.connect() as connection:
        while True:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                # Locked before the snapshot is taken: a truncate in between would empty what the snapshot still shows.
                connection.execute(f"LOCK TABLE {_from(table)} IN ACCESS SHARE MODE")
            except psycopg.errors.UndefinedTable:
                connection.execute("ROLLBACK")
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                table = replace(table, oid=0)  # dropped meanwhile: no rows, seen by everybody
            [(shown, position, ts_ms)] = connection.execute(
                "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, "
                "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            ).fetchall()
            if _saw(shown, told["must_see"]):
                break
            # Its record is in the log, but it is not yet among the finished: a moment later it is.
            connection.execute("ROLLBACK")
            if time.monotonic() > until:
                raise SourceRefused(
                    f"transaction {told['must_see']}, which emptied {table.full_name}, stays invisible. Try again."
                )
            time.sleep(0.02)
        facts: dict[str, Any] = {"snapshot": shown, "position": parse_lsn(position), "ts_ms": int(ts_ms)}
        body, lengths = bytearray(), array("I")
        if table.oid:
            columns = [
                column
                for column in catalog.columns_of(connection, table.oid)
                if told["columns"] is None or column.name in told["columns"]
            ]
            facts["relation"] = catalog.relation_of(connection, table, columns).to_json()
            _copy(connection, _copy_command(table, chunk, columns), body, lengths)
        connection.execute("COMMIT")
    write_segment(path, body, lengths, facts)


def _saw(snapshot: str, xid: int | None) -> bool:
    if xid is None:
        return True
    found = Snapshot.parse(snapshot)
    return bool(found.saw(widened(np.array([xid], dtype=np.int64), found.xmax))[0])


def _copy_command(table: FollowedTable, chunk: ChunkPlan, columns: Sequence[TableColumn]) -> str:
    key = chunk.table["key"]
    names = ", ".join(quoted(name) for name, _, _ in key)

    def bound(values: Sequence[str]) -> str:
        return ", ".join(f"{literal(value)}::{kind}" for value, (_, kind, _) in zip(values, key, strict=True))

    where = [f"({names}) > ({bound(chunk.after)})"] if chunk.after is not None else []
    where += [f"({names}) <= ({bound(chunk.upto)})"] if chunk.upto is not None else []
    where += [f"({chunk.table['filter']})"] if chunk.table["filter"] else []
    shown = ", ".join(_as_text(column) for column in columns)
    rows = f"SELECT {shown} FROM {_from(table)}" + (f" WHERE {' AND '.join(where)}" if where else "")  # noqa: S608
    return f"COPY ({rows} ORDER BY {names}) TO STDOUT (FORMAT binary)"


def _as_text(column: TableColumn) -> str:
    """The text that the type itself prints, as the log has it."""
    name = quoted(column.name)
    if column.type in _TEXTS:
        return name
    if column.type in _CASTS_LIKE_OUTPUT:
        return f"{name}::text"
    # A composite value of nulls alone IS NULL, and yet is a value.
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END"


def _copy(connection: Connection, command: str, body: bytearray, lengths: array[int]) -> None:
    raw = connection.pgconn
    result = raw.exec_(command.encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
    get = raw.get_copy_data
    while True:
        length, data = get(0)
        if length < 0:
            break
        body += data
        lengths.append(length)
    ended = raw.get_result()
    while ended is not None:
        if ended.status != pq.ExecStatus.COMMAND_OK:
            raise psycopg.OperationalError(ended.error_message.decode(errors="replace"))
        ended = raw.get_result()


def _from(table: FollowedTable) -> str:
    """A partitioned table stands for its partitions; another one not for those that inherit from it."""
    only = "" if table.partitioned else "ONLY "
    return f"{only}{quoted(table.schema)}.{quoted(table.name)}"


def locate(login: Login, table: SeenTable, keys: list[pa.Array]) -> Numbers:
    """Asks the server which chunk a key belongs to: its collations decide, never Python's order. In a task."""
    if not table.bounds:
        return np.zeros(len(keys[0]), dtype=np.int64)
    arrays: list[Any] = [[bound[at] for bound in table.bounds] for at in range(len(table.key))]
    arrays += [key.to_pylist() for key in keys]
    count = len(table.key)
    typed = ", ".join(
        f"k{at}::{kind}" + (f" COLLATE {collation}" if collation else "") + f" AS k{at}"
        for at, (_, kind, collation) in enumerate(table.key)
    ).replace("%", "%%")
    names = ", ".join(f"k{at}" for at in range(count))
    lists = ", ".join(["%s::text[]"] * count)
    # A key that equals a bound belongs to the chunk that ends there: so of equals the key comes before the bound.
    sql = (
        f"SELECT place - 1, bounds FROM (SELECT place, is_bound, count(*) FILTER (WHERE is_bound) "  # noqa: S608
        f"OVER (ORDER BY {names}, is_bound ROWS UNBOUNDED PRECEDING) AS bounds FROM ("
        f"SELECT {typed}, place, true AS is_bound FROM unnest({lists}) WITH ORDINALITY AS b({names}, place) "
        "UNION ALL "
        f"SELECT {typed}, place, false FROM unnest({lists}) WITH ORDINALITY AS c({names}, place)) AS both_sides) "
        "AS counted WHERE NOT is_bound ORDER BY place"
    )
    with login.connect() as connection:
        rows = connection.execute(sql, arrays).fetchall()
    return np.array([bounds for _, bounds in rows], dtype=np.int64)
