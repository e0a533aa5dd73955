"""A snapshot by chunks: planned once, each chunk read in a transaction of its own and pinned as a file; and what a
chunk saw, so that a change behind it is told exactly once, in the chunk or in the log.

    plan-<generation>.json      tables, their chunks' bounds; written before the first chunk is read
    chunk-<generation>-<n>.seg  the rows of a chunk and what its transaction saw; the first attempt to finish wins
    seen-<generation>.json      what all chunks saw; written before the first change behind them is told

Each of them is written once. So whatever is killed, a chunk's rows are the same when they are read again.

Where the log was when a chunk was read does not decide it: a transaction's record is in the log before others can see
what it did. The chunk's own snapshot decides, transaction by transaction. Pure, but for the one question (``Locate``)
that only the server's own order of keys can answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.cdc.decoding import Described
from millstream.cdc.errors import SnapshotLost
from millstream.cdc.segments import Numbers, pin_json, read_facts

Locate = Callable[["SeenTable", list[pa.Array]], Numbers]
"""Which chunk each key belongs to."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """As ``pg_current_snapshot()`` has it: of transactions by their numbers all below ``xmin`` are seen, none from
    ``xmax`` on; between, all but ``running``. Where the log itself tells what was seen, a number is a place in it."""

    xmin: int
    xmax: int
    running: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def saw(self, xids: Numbers) -> npt.NDArray[np.bool_]:
        """For transactions that have committed, by their 64-bit numbers."""
        done = xids < self.xmin
        return done | ((xids < self.xmax) & ~np.isin(xids, self.running))


def widened(xids: Numbers, near: int) -> Numbers:
    """The log has 32 bits of a transaction's number, a snapshot 64. The one meant is the nearest to ``near``."""
    distance = (xids - near) & 0xFFFFFFFF
    return near + np.where(distance >= 1 << 31, distance - (1 << 32), distance)


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A table's chunks: what bounds them, what each of them saw, and the position behind which none saw anything."""

    schema: str
    table: str
    key: tuple[tuple[str, str, str | None], ...]
    """Name, type and collation of the key's columns, in the key's order."""
    bounds: tuple[tuple[str, ...], ...]
    snapshots: tuple[Snapshot, ...]
    settled: int
    wide: bool = False
    """Whether the log has all 64 bits of a transaction's number."""

    def judge(self, xids: Numbers) -> npt.NDArray[np.bool_]:
        """One row for each chunk: whether it saw each of the transactions."""
        wide = xids if self.wide else widened(xids, max(snapshot.xmax for snapshot in self.snapshots))
        return np.array([snapshot.saw(wide) for snapshot in self.snapshots])

    def disputed(self, xid: int) -> bool:
        """Whether some chunks saw it and some did not."""
        seen = self.judge(np.array([xid], dtype=np.int64))
        return bool(seen.any() and not seen.all())

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
    def from_json(cls, told: dict[str, Any]) -> SeenTable:
        key = tuple((name, kind, collation) for name, kind, collation in told["key"])
        snapshots = tuple(Snapshot(xmin, xmax, tuple(running)) for xmin, xmax, running in told["snapshots"])
        bounds = tuple(tuple(bound) for bound in told["bounds"])
        return cls(told["schema"], told["table"], key, bounds, snapshots, told["settled"], told.get("wide", False))


class Unseen:
    """Decides which changes are not in a snapshot: a ``Keep`` for the decoder."""

    def __init__(self, tables: Sequence[SeenTable], locate: Locate) -> None:
        self._tables = {(each.schema, each.table): each for each in tables}
        self._locate = locate

    def __call__(self, relation: Described, xids: Numbers, keys: list[pa.Array]) -> npt.NDArray[np.bool_] | None:
        table = self._tables.get((relation.schema, relation.table))
        if table is None:
            return None
        several, which = np.unique(xids, return_inverse=True)
        seen = table.judge(several)
        if not seen.any():
            return None
        by_all: npt.NDArray[np.bool_] = np.all(seen, axis=0)
        by_some: npt.NDArray[np.bool_] = np.any(seen, axis=0)
        disputed = (by_some & ~by_all)[which]
        kept: npt.NDArray[np.bool_] = ~by_all[which]
        if disputed.any():
            if not keys:
                raise SnapshotLost(
                    f"table {relation.schema}.{relation.table} was emptied in the middle of its snapshot, which was "
                    "not begun again. Please report this; `millstream pipeline reset` begins anew."
                )
            rows = np.flatnonzero(disputed)
            ordered = self._in_order(table, relation, keys)
            chunk = self._locate(table, [key.take(pa.array(rows)) for key in ordered])
            kept[rows] = ~seen[chunk, which[rows]]
        return kept

    @staticmethod
    def _in_order(table: SeenTable, relation: Described, keys: list[pa.Array]) -> list[pa.Array]:
        """The columns of a row stand in the table's order, those of the bounds in the key's."""
        by_name = dict(zip((relation.columns[at].name for at in relation.key), keys, strict=True))
        missing = [name for name, _, _ in table.key if name not in by_name]
        if missing:
            raise SnapshotLost(
                f"the key of {relation.schema}.{relation.table} has changed since its snapshot began "
                f"({', '.join(missing)} is gone). Begin anew: `millstream pipeline reset`."
            )
        return [by_name[name] for name, _, _ in table.key]


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


def write_plan(
    directory: Path,
    generation: int,
    tables: Sequence[Mapping[str, Any]],
    *,
    emptied: Sequence[Mapping[str, Any]] = (),
    known: Sequence[str] = (),
) -> SnapshotPlan:
    """Writes down how tables are cut. A plan that was not yet used is made anew."""
    told = {
        "generation": generation,
        "tables": list(tables),
        "emptied": [dict(turn) for turn in emptied],
        "known": sorted({*known, *(f"{table['schema']}.{table['table']}" for table in tables)}),
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
            wide = table.get("wide", False)
            fresh.append(SeenTable(table["schema"], table["table"], key, bounds, snapshots, settled, wide))
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
