"""Chunks of a PostgreSQL snapshot: splits tables, reads a chunk, and records which transactions are visible to it."""

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

from millstream.cdc.errors import SnapshotLost, SourceRefused, TableChanged
from millstream.cdc.options import refuse_missing_excluded
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.catalog import Connection, FollowedTable, TableColumn
from millstream.cdc.postgres.connection import Login, literal, quoted
from millstream.cdc.postgres.pgoutput import parse_lsn
from millstream.cdc.postgres.preparation import SlotConfig
from millstream.cdc.segments import Numbers, write_segment
from millstream.cdc.snapshot import ChunkPlan, SeenTable, Snapshot, widened

# Types whose cast to text equals the output of the type. For others (boolean, char(n), inet, ...) it may differ.
_CASTS_LIKE_OUTPUT = frozenset(
    (17, 20, 21, 23, 26, 114, 700, 701, 1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802)
)
_TEXTS = frozenset((25, 1043))
_VISIBLE_TIMEOUT_S = 60.0
_LARGE_BYTES = 8 << 20
_SAMPLE_PER_CHUNK = 1_000
"""Rows of a large table that are sampled per chunk. Chunk sizes then differ by a few percent, and the first row does
not have to wait until all keys are sorted."""
_SIZE = """
SELECT coalesce((SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree(%(table)s) WHERE isleaf),
                pg_relation_size(%(table)s))::bigint
"""


def split_tables(
    connection: Connection,
    tables: Sequence[FollowedTable],
    row_filters: Mapping[str, str | None],
    *,
    chunk_rows: int,
    must_see: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Queries the bounds of each table's chunks. Bounds do not affect the events: in the server's sort order of keys
    each row is in exactly one chunk."""
    planned = []
    for table in tables:
        key = catalog.key_of(connection, table.oid)
        columns = {column.name: column for column in catalog.columns_of(connection, table.oid)}
        key_types = [[name, columns[name].type_name, columns[name].collation] for name in key]
        names = ", ".join(quoted(name) for name in key)
        [(size,)] = connection.execute(_SIZE, {"table": table.oid}).fetchall()
        rows, nth = _sampled_rows(table, size, chunk_rows)
        bounds = connection.execute(
            f"SELECT {', '.join(quoted(name) + '::text' for name in key)} FROM "  # noqa: S608  # quoted identifiers
            f"(SELECT {names}, row_number() OVER (ORDER BY {names}) AS place FROM {rows}) AS ordered "
            f"WHERE place % {nth:d} = 0 ORDER BY place"
        ).fetchall()
        planned.append(
            {
                "oid": table.oid,
                "schema": table.schema,
                "table": table.name,
                "identity": table.identity,
                "partitioned": table.partitioned,
                "key": key_types,
                "bounds": [list(bound) for bound in bounds],
                "filter": row_filters.get(table.full_name),
                "must_see": must_see.get(table.full_name),
            }
        )
    return planned


def _sampled_rows(table: FollowedTable, size: int, chunk_rows: int) -> tuple[str, int]:
    """A FROM clause with the rows whose keys are sorted, and n: every nth of them ends a chunk."""
    if size < _LARGE_BYTES or chunk_rows < 10 * _SAMPLE_PER_CHUNK:
        return _from(table), chunk_rows
    return f"{_from(table)} TABLESAMPLE BERNOULLI ({100 * _SAMPLE_PER_CHUNK / chunk_rows:.6f})", _SAMPLE_PER_CHUNK


def read_chunk(login: Login, path: Path, chunk: ChunkPlan, config: SlotConfig) -> None:
    """Reads a chunk and writes it as a segment. Runs in a task."""
    plan = chunk.table
    table = FollowedTable(plan["oid"], plan["schema"], plan["table"], plan["identity"], plan["partitioned"], False)
    deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
    with login.connect() as connection:
        while True:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                # The table is locked before the database snapshot is taken: TRUNCATE is not MVCC-safe, so a truncation
                # in between would remove rows that the database snapshot should include.
                connection.execute(f"LOCK TABLE {_from(table)} IN ACCESS SHARE MODE")
            except psycopg.errors.UndefinedTable:
                connection.execute("ROLLBACK")
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                table = replace(table, oid=0)  # dropped since the plan: the chunk has no rows
            _refuse_replaced_table(connection, table)
            [(snapshot, position, ts_ms)] = connection.execute(
                "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, "
                "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
            ).fetchall()
            if _sees(snapshot, plan["must_see"]):
                break
            # The transaction's commit record is in the log, but the transaction is not visible yet. It soon will be.
            connection.execute("ROLLBACK")
            if time.monotonic() > deadline:
                raise SourceRefused(
                    f"transaction {plan['must_see']} truncated {table.full_name}, and is not visible yet. Try again."
                )
            time.sleep(0.02)
        metadata: dict[str, Any] = {"snapshot": snapshot, "position": parse_lsn(position), "ts_ms": int(ts_ms)}
        body, lengths = bytearray(), array("I")
        if table.oid:
            # The current names: columns can be added and renamed after the snapshot was planned.
            sent = catalog.sent_columns(connection, config.publication, table.oid)
            if not sent:
                raise TableChanged({table.full_name: "it was removed from the publication"}, during_snapshot=True)
            refuse_missing_excluded(table.full_name, sent, config.exclude)
            columns = [column for column in catalog.columns_of(connection, table.oid) if sent.get(column.name)]
            _refuse_other_key(table, plan["key"], columns)
            metadata["relation"] = catalog.relation_of(connection, table, columns).to_json()
            _copy(connection, _copy_command(table, chunk, columns), body, lengths)
        connection.execute("COMMIT")
    write_segment(path, body, lengths, metadata)


def _refuse_replaced_table(connection: Connection, table: FollowedTable) -> None:
    """All chunks of a snapshot must be of the same table. It is locked, so its name cannot change now."""
    if table.oid:
        name = f"{quoted(table.schema)}.{quoted(table.name)}"
        [(oid,)] = connection.execute("SELECT %s::regclass::oid::bigint", (name,)).fetchall()
        if oid != table.oid:
            raise TableChanged({table.full_name: "a different table has its name now"}, during_snapshot=True)


def _refuse_other_key(
    table: FollowedTable, planned: Sequence[Sequence[str | None]], columns: Sequence[TableColumn]
) -> None:
    """Chunk bounds are values of the key that the table had when the snapshot was planned."""
    now = {column.name: [column.name, column.type_name, column.collation] for column in columns}
    if any(now.get(str(name)) != [name, *type_and_collation] for name, *type_and_collation in planned):
        raise SnapshotLost(
            f"the key of {table.full_name} was renamed or has another type since its snapshot began. Start over: "
            "`millstream pipeline reset`."
        )


def _sees(snapshot: str, xid: int | None) -> bool:
    if xid is None:
        return True
    parsed = Snapshot.parse(snapshot)
    return bool(parsed.sees(widened(np.array([xid], dtype=np.int64), parsed.xmax))[0])


def _copy_command(table: FollowedTable, chunk: ChunkPlan, columns: Sequence[TableColumn]) -> str:
    key = chunk.table["key"]
    names = ", ".join(quoted(name) for name, _, _ in key)

    def bound(values: Sequence[str]) -> str:
        return ", ".join(f"{literal(value)}::{kind}" for value, (_, kind, _) in zip(values, key, strict=True))

    where = [f"({names}) > ({bound(chunk.after)})"] if chunk.after is not None else []
    where += [f"({names}) <= ({bound(chunk.upto)})"] if chunk.upto is not None else []
    where += [f"({chunk.table['filter']})"] if chunk.table["filter"] else []
    expressions = ", ".join(_as_text(column) for column in columns)
    rows = f"SELECT {expressions} FROM {_from(table)}" + (f" WHERE {' AND '.join(where)}" if where else "")  # noqa: S608
    return f"COPY ({rows} ORDER BY {names}) TO STDOUT (FORMAT binary)"


def _as_text(column: TableColumn) -> str:
    """An SQL expression for the text that the type's output function returns, as in the log."""
    name = quoted(column.name)
    if column.type in _TEXTS:
        return name
    if column.type in _CASTS_LIKE_OUTPUT:
        return f"{name}::text"
    # A composite value whose fields are all null IS NULL, but it is a value.
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END"


def _copy(connection: Connection, command: str, body: bytearray, lengths: array[int]) -> None:
    raw = connection.pgconn
    result = raw.exec_(command.encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise _server_error(result)
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
            raise _server_error(ended)
        ended = raw.get_result()


def _server_error(result: pq.abc.PGresult) -> psycopg.Error:
    """The psycopg error class for the SQLSTATE: only transient errors become OperationalError, which is retried."""
    try:
        kind = psycopg.errors.lookup((result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode())
    except KeyError:
        kind = psycopg.OperationalError
    return kind(result.error_message.decode(errors="replace"))


def _from(table: FollowedTable) -> str:
    """The table in a FROM clause: a partitioned table with its partitions, others without inheriting tables."""
    only = "" if table.partitioned else "ONLY "
    return f"{only}{quoted(table.schema)}.{quoted(table.name)}"


def locate(login: Login, table: SeenTable, keys: list[pa.Array]) -> Numbers:
    """Queries which chunk each key belongs to, because only the server has its collations. Runs in a task."""
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
    # A key that equals a bound belongs to the chunk that ends there, so the key is sorted before an equal bound.
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
