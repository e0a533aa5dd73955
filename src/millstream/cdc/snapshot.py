"""Snapshots in chunks, and the filter that removes changes from the log which a chunk already includes.

A snapshot is planned once. Each chunk is read in a transaction of its own and stored as a file:

    plan-<generation>.json      tables and the bounds of their chunks; written before the first chunk is read
    chunk-<generation>-<n>.seg  rows of a chunk and the transactions visible to it; the first attempt to finish wins
    seen-<generation>.json      transactions visible to all chunks; written before the first change is decoded

Each file is written once, so a chunk has the same rows when a task reads it again after a crash.

The log position at which a chunk was read does not decide whether it includes a transaction: the transaction's record
is in the log before its changes are visible. The chunk's own database snapshot decides, for each transaction. All of
this is pure except ``Locate``, which asks the server, because only the server knows its sort order of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.cdc.decoding import TableDescription
from millstream.cdc.errors import SnapshotLost
from millstream.cdc.identity import full_name
from millstream.cdc.segments import Numbers, read_json, read_stored_metadata, write_json_once
from millstream.storage import ObjectMissing, Storage

Locate = Callable[["SeenTable", list[pa.Array]], Numbers]
"""Returns the chunk that each key belongs to."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A database snapshot like ``pg_current_snapshot()``: transaction ids below ``xmin`` are visible, ids from ``xmax``
    on are not, and between them all but ``running`` are. In MariaDB the ids are log positions."""

    xmin: int
    xmax: int
    running: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xids: Numbers) -> npt.NDArray[np.bool_]:
        """Whether each committed transaction is visible, by 64-bit ids."""
        done = xids < self.xmin
        return done | ((xids < self.xmax) & ~np.isin(xids, self.running))


def widened(xids: Numbers, near: int) -> Numbers:
    """64-bit transaction ids from the 32-bit ids in the log: the id nearest to ``near``."""
    distance = (xids - near) & 0xFFFFFFFF
    return near + np.where(distance >= 1 << 31, distance - (1 << 32), distance)


@dataclass(frozen=True, slots=True)
class SeenTable:
    """The chunks of a table: their bounds, their database snapshots, and the log position ``settled``, after which no
    change is included in any chunk."""

    schema: str
    table: str
    key: tuple[tuple[str, str, str | None], ...]
    """Name, type and collation of the key's columns, in the key's order."""
    bounds: tuple[tuple[str, ...], ...]
    snapshots: tuple[Snapshot, ...]
    settled: int
    wide: bool = False
    """Whether the log has 64-bit transaction ids."""

    def visibility(self, xids: Numbers) -> npt.NDArray[np.bool_]:
        """One row per chunk: whether each transaction is visible to it."""
        wide = xids if self.wide else widened(xids, max(snapshot.xmax for snapshot in self.snapshots))
        return np.array([snapshot.sees(wide) for snapshot in self.snapshots])

    def disputed(self, xid: int) -> bool:
        """Whether the transaction is visible to a part of the chunks only."""
        is_visible = self.visibility(np.array([xid], dtype=np.int64))
        return bool(is_visible.any() and not is_visible.all())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "table": self.table,
            "key": [list(column) for column in self.key],
            "bounds": [list(bound) for bound in self.bounds],
            "snapshots": [[s.xmin, s.xmax, list(s.running)] for s in self.snapshots],
            "settled": self.settled,
            "wide": self.wide,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> SeenTable:
        key = tuple((name, kind, collation) for name, kind, collation in document["key"])
        snapshots = tuple(Snapshot(xmin, xmax, tuple(running)) for xmin, xmax, running in document["snapshots"])
        bounds = tuple(tuple(bound) for bound in document["bounds"])
        return cls(
            document["schema"],
            document["table"],
            key,
            bounds,
            snapshots,
            document["settled"],
            document.get("wide", False),
        )


class UnseenChanges:
    """The ``ChangeFilter`` for a snapshot: keeps the changes that no chunk includes."""

    def __init__(self, tables: Sequence[SeenTable], locate: Locate) -> None:
        self._tables = {(table.schema, table.table): table for table in tables}
        self._locate = locate

    def __call__(self, relation: TableDescription, xids: Numbers, keys: list[pa.Array]) -> npt.NDArray[np.bool_] | None:
        table = self._tables.get((relation.schema, relation.table))
        if table is None:
            return None
        distinct, inverse = np.unique(xids, return_inverse=True)
        is_visible = table.visibility(distinct)
        if not is_visible.any():
            return None
        by_all: npt.NDArray[np.bool_] = np.all(is_visible, axis=0)
        by_any: npt.NDArray[np.bool_] = np.any(is_visible, axis=0)
        disputed = (by_any & ~by_all)[inverse]
        result: npt.NDArray[np.bool_] = ~by_all[inverse]
        if disputed.any():
            if not keys:
                raise SnapshotLost(
                    f"table {relation.schema}.{relation.table} was emptied in the middle of its snapshot, which was "
                    "not restarted. Please report this. Start over: `millstream pipeline reset`."
                )
            rows = np.flatnonzero(disputed)
            ordered = self._in_order(table, relation, keys)
            chunk = self._locate(table, [key.take(pa.array(rows)) for key in ordered])
            result[rows] = ~is_visible[chunk, inverse[rows]]
        return result

    @staticmethod
    def _in_order(table: SeenTable, relation: TableDescription, keys: list[pa.Array]) -> list[pa.Array]:
        """The key columns in the key's order, as the bounds have them; rows have them in the table's order."""
        by_name = dict(zip((relation.columns[at].name for at in relation.key), keys, strict=True))
        missing = [name for name, _, _ in table.key if name not in by_name]
        if missing:
            raise SnapshotLost(
                f"the key of {relation.schema}.{relation.table} has changed since its snapshot began "
                f"({', '.join(missing)} is gone). Start over: `millstream pipeline reset`."
            )
        return [by_name[name] for name, _, _ in table.key]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: the rows of a table with keys in ``(after, upto]``. None means no bound on that side."""

    table: dict[str, Any]
    number: int
    after: Sequence[str] | None
    upto: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The chunks of a snapshot. ``emptied``: truncations to send first, as ``t`` events, for tables whose rows are
    read again."""

    generation: int
    tables: list[dict[str, Any]]
    emptied: list[dict[str, Any]]
    covered: list[str]
    """All tables that have a snapshot, or need none, after this snapshot."""
    identities: dict[str, Any] = field(default_factory=dict)
    """Table identities, as ``ChangeDatabase.identities`` returns them."""
    handled: list[int] = field(default_factory=list)
    """Log positions of table changes for which this snapshot, or an earlier one, was taken."""

    @property
    def opening(self) -> int:
        """Number of chunks before the first one with rows: 1 if there are truncations to send."""
        return 1 if self.emptied else 0

    @property
    def count(self) -> int:
        return self.opening + sum(len(table["bounds"]) + 1 for table in self.tables)

    def chunk(self, index: int) -> ChunkPlan | None:
        """The chunk at ``index``; None: the truncations."""
        if index < self.opening:
            return None
        index -= self.opening
        for table in self.tables:
            bounds = table["bounds"]
            if index <= len(bounds):
                after = bounds[index - 1] if index else None
                return ChunkPlan(table, index, after, bounds[index] if index < len(bounds) else None)
            index -= len(bounds) + 1
        raise AssertionError("the chunk index is beyond the plan's end")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SnapshotPlan:
        further = document.get("identities", {}), document.get("handled", [])
        return cls(document["generation"], document["tables"], document["emptied"], document["known"], *further)


def plan_name(generation: int) -> str:
    return f"plan-{generation}.json"


def chunk_name(generation: int, index: int) -> str:
    return f"chunk-{generation}-{index}.seg"


def seen_name(generation: int) -> str:
    return f"seen-{generation}.json"


def _delete_chunks(storage: Storage, generation: int) -> None:
    storage.delete_all(entry.name for entry in storage.list() if entry.name.startswith(f"chunk-{generation}-"))


def write_plan(
    storage: Storage,
    generation: int,
    tables: Sequence[Mapping[str, Any]],
    *,
    emptied: Sequence[Mapping[str, Any]] = (),
    covered: Sequence[str] = (),
    identities: Mapping[str, Any] | None = None,
    handled: Sequence[int] = (),
) -> SnapshotPlan:
    """Writes the plan of a snapshot. Replaces a plan of the same generation, which no logged offset uses yet."""
    document = {
        "generation": generation,
        "tables": list(tables),
        "emptied": [dict(truncation) for truncation in emptied],
        "known": sorted({*covered, *(full_name(table["schema"], table["table"]) for table in tables)}),
        "identities": dict(identities or {}),
        "handled": list(handled),
    }
    storage.delete(plan_name(generation))
    _delete_chunks(storage, generation)
    return SnapshotPlan.from_json(write_json_once(storage, plan_name(generation), document))


def read_plan(storage: Storage, generation: int) -> SnapshotPlan:
    name = plan_name(generation)
    try:
        return SnapshotPlan.from_json(read_json(storage, name))
    except ObjectMissing as error:
        raise SnapshotLost(
            f"{storage.uri(name)} is gone, so the chunks of the snapshot are unknown. Start over: `millstream pipeline "
            "reset`."
        ) from error


def write_seen(storage: Storage, plan: SnapshotPlan, earlier: Sequence[SeenTable], position: int) -> list[SeenTable]:
    """Stores the visibility of a finished snapshot's chunks, and of earlier snapshots that still matter after
    ``position``. Then removes the chunk files."""
    name = seen_name(plan.generation)
    if not storage.exists(name):
        fresh, index = [], plan.opening
        for table in plan.tables:
            metadata = []
            for _ in range(len(table["bounds"]) + 1):
                metadata.append(_chunk_metadata(storage, chunk_name(plan.generation, index)))
                index += 1
            key = tuple((column, kind, collation) for column, kind, collation in table["key"])
            bounds = tuple(tuple(bound) for bound in table["bounds"])
            snapshots = tuple(Snapshot.parse(fact["snapshot"]) for fact in metadata)
            settled = max(fact["position"] for fact in metadata)
            wide = table.get("wide", False)
            fresh.append(SeenTable(table["schema"], table["table"], key, bounds, snapshots, settled, wide))
        planned = {(table.schema, table.table) for table in fresh}
        fresh += [old for old in earlier if (old.schema, old.table) not in planned and old.settled > position]
        write_json_once(storage, name, {"tables": [table.to_json() for table in fresh]})
    _delete_chunks(storage, plan.generation)
    return read_seen(storage, plan.generation)


def _chunk_metadata(storage: Storage, name: str) -> dict[str, Any]:
    try:
        return read_stored_metadata(storage, name)
    except ObjectMissing as error:
        raise SnapshotLost(
            f"{storage.uri(name)} is gone before its database snapshot was recorded. Start over: `millstream pipeline "
            "reset`."
        ) from error


def read_seen(storage: Storage, generation: int) -> list[SeenTable]:
    name = seen_name(generation)
    try:
        return [SeenTable.from_json(table) for table in read_json(storage, name)["tables"]]
    except ObjectMissing as error:
        why = f"{storage.uri(name)} is gone, so the snapshot's content is unknown. Start over: `millstream pipeline "
        raise SnapshotLost(why + "reset`.") from error
