"""A snapshot by chunks: planned once, each chunk read in a transaction of its own and pinned as a file.

    plan-<generation>.json      tables, their chunks' bounds; written before the first chunk is read
    chunk-<generation>-<n>.seg  the rows of a chunk and what its transaction saw; the first attempt to finish wins
    seen-<generation>.json      what all chunks saw; written before the first change behind them is told

Each of them is written once. So whatever is killed, a chunk's rows are the same when they are read again.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq

from millstream.cdc.errors import SnapshotLost, SourceRefused
from millstream.cdc.postgres import catalog
from millstream.cdc.postgres.catalog import Connection, FollowedTable, Published, TableColumn
from millstream.cdc.postgres.connection import Login, literal, quoted
from millstream.cdc.postgres.pgoutput import parse_lsn
from millstream.cdc.postgres.visibility import SeenTable, Snapshot, widened
from millstream.cdc.segments import Numbers, pin_json, read_facts, write_segment

# Types whose cast to text prints what the type itself prints. Of others (boolean, char(n), inet, ...) it may not.
_CASTS_LIKE_OUTPUT = frozenset(
    (17, 20, 21, 23, 26, 114, 700, 701, 1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802)
)
_TEXTS = frozenset((25, 1043))
_UNSEEN_S = 60.0


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: rows of a table with keys in ``(after, upto]``; None: no bound on that side."""

    table: dict[str, Any]
    number: int
    after: Sequence[str] | None
    upto: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Which tables are read in which chunks. ``emptied`` are told first, as ``t``: their rows begin again."""

    generation: int
    tables: list[dict[str, Any]]
    emptied: list[dict[str, Any]]
    known: list[str]
    """Every table that has, or needs no, snapshot by the end of this one."""

    @property
    def opening(self) -> int:
        """How many chunks come before the first with rows: they are told before any of those are read."""
        return 1 if self.emptied else 0

    @property
    def count(self) -> int:
        return self.opening + sum(len(table["bounds"]) + 1 for table in self.tables)

    def chunk(self, index: int) -> ChunkPlan | None:
        """None: the opening."""
        if index < self.opening:
            return None
        index -= self.opening
        for table in self.tables:
            bounds = table["bounds"]
            if index <= len(bounds):
                after = bounds[index - 1] if index else None
                return ChunkPlan(table, index, after, bounds[index] if index < len(bounds) else None)
            index -= len(bounds) + 1
        raise AssertionError("a chunk beyond the plan's end")

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> SnapshotPlan:
        return cls(told["generation"], told["tables"], told["emptied"], told["known"])


def plan_path(directory: Path, generation: int) -> Path:
    return directory / f"plan-{generation}.json"


def chunk_path(directory: Path, generation: int, index: int) -> Path:
    return directory / f"chunk-{generation}-{index}.seg"


def seen_path(directory: Path, generation: int) -> Path:
    return directory / f"seen-{generation}.json"


def make_plan(
    connection: Connection,
    directory: Path,
    generation: int,
    tables: Sequence[FollowedTable],
    published: Mapping[str, Published],
    *,
    chunk_rows: int,
    emptied: Sequence[Mapping[str, Any]] = (),
    known: Sequence[str] = (),
) -> SnapshotPlan:
    """Asks the server where to cut each table, and writes the plan down. A plan that was not yet used is made anew."""
    must_see = {name: turn["xid"] for turn in emptied for name in turn["tables"]}
    planned = []
    for table in tables:
        key = catalog.key_of(connection, table.oid)
        columns = {column.name: column for column in catalog.columns_of(connection, table.oid)}
        described = [[name, columns[name].type_name, columns[name].collation] for name in key]
        names = ", ".join(quoted(name) for name in key)
        bounds = connection.execute(
            f"SELECT {', '.join(quoted(name) + '::text' for name in key)} FROM "  # noqa: S608  # quoted identifiers
            f"(SELECT {names}, row_number() OVER (ORDER BY {names}) AS place FROM {_from(table)}) AS ordered "
            f"WHERE place % {chunk_rows:d} = 0 ORDER BY place"
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
    told = {
        "generation": generation,
        "tables": planned,
        "emptied": [dict(turn) for turn in emptied],
        "known": sorted({*known, *(table.full_name for table in tables)}),
    }
    for stale in (plan_path(directory, generation), *directory.glob(f"chunk-{generation}-*.seg")):
        stale.unlink(missing_ok=True)
    return SnapshotPlan.from_json(pin_json(plan_path(directory, generation), told))


def read_plan(directory: Path, generation: int) -> SnapshotPlan:
    path = plan_path(directory, generation)
    try:
        return SnapshotPlan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise SnapshotLost(
            f"{path} is gone, and with it how the snapshot was cut. Begin anew: `millstream pipeline reset`."
        ) from error


def pinned_chunk(login: Login, directory: Path, plan: SnapshotPlan, index: int) -> Path:
    """The chunk's file; read from the table now, unless an earlier attempt has finished. In a task."""
    path = chunk_path(directory, plan.generation, index)
    if not path.exists():
        chunk = plan.chunk(index)
        assert chunk is not None, "the opening has no file"
        _read_chunk(login, path, chunk)
    return path


def _read_chunk(login: Login, path: Path, chunk: ChunkPlan) -> None:
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


def note_seen(directory: Path, plan: SnapshotPlan, earlier: Sequence[SeenTable], position: int) -> list[SeenTable]:
    """What the chunks of a finished snapshot saw, written down; what earlier ones saw, as far as it still matters."""
    path = seen_path(directory, plan.generation)
    if not path.exists():
        fresh, index = [], plan.opening
        for table in plan.tables:
            facts = []
            for _ in range(len(table["bounds"]) + 1):
                chunk = chunk_path(directory, plan.generation, index)
                if not chunk.exists():
                    raise SnapshotLost(
                        f"{chunk} is gone before it was known what it saw. Begin anew: `millstream pipeline reset`."
                    )
                facts.append(read_facts(chunk))
                index += 1
            key = tuple((name, kind, collation) for name, kind, collation in table["key"])
            bounds = tuple(tuple(bound) for bound in table["bounds"])
            snapshots = tuple(Snapshot.parse(fact["snapshot"]) for fact in facts)
            settled = max(fact["position"] for fact in facts)
            fresh.append(SeenTable(table["schema"], table["table"], key, bounds, snapshots, settled))
        again = {(table.schema, table.table) for table in fresh}
        fresh += [old for old in earlier if (old.schema, old.table) not in again and old.settled > position]
        pin_json(path, {"tables": [table.to_json() for table in fresh]})
    for chunk in directory.glob(f"chunk-{plan.generation}-*.seg"):
        chunk.unlink(missing_ok=True)
    return read_seen(path)


def read_seen(path: Path) -> list[SeenTable]:
    try:
        return [SeenTable.from_json(told) for told in json.loads(path.read_text(encoding="utf-8"))["tables"]]
    except FileNotFoundError as error:
        why = f"{path} is gone, and with it what the snapshot saw. Begin anew: `millstream pipeline reset`."
        raise SnapshotLost(why) from error


class ServersOrder:
    """Asks the server which chunk a key belongs to: its collations decide, never Python's order. In a task."""

    def __init__(self, login: Login) -> None:
        self._login = login

    def __call__(self, table: SeenTable, keys: list[pa.Array]) -> Numbers:
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
        with self._login.connect() as connection:
            rows = connection.execute(sql, arrays).fetchall()
        return np.array([bounds for _, bounds in rows], dtype=np.int64)
