"""A snapshot by chunks: planned once, each chunk read in a transaction of its own and pinned as a file.

    plan-<generation>.json      tables, their chunks' bounds; written before the first chunk is read
    chunk-<generation>-<n>.seg  the rows of a chunk and what its transaction saw; the first attempt to finish wins
    seen-<generation>.json      what all chunks saw; written before the first change behind them is told

Each of them is written once. So whatever is killed, a chunk's rows are the same when they are read again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.cdc.errors import SnapshotLost
from millstream.cdc.segments import pin_json, read_facts
from millstream.cdc.visibility import SeenTable, Snapshot


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
