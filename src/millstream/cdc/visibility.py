"""What a chunk of a snapshot saw: so that a change behind it is told exactly once, in the chunk or in the log.

Where the log was when a chunk was read does not decide it: a transaction's record is in the log before others can see
what it did. The chunk's own snapshot decides, transaction by transaction. Pure, but for the one question (``Locate``)
that only the server's own order of keys can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.cdc.decoding import Described
from millstream.cdc.errors import SnapshotLost
from millstream.cdc.segments import Numbers

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
