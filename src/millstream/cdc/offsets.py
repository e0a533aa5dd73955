"""How far a query of changes has come, as Spark logs it: a position in the log, and which chunks of which snapshot.

All that decides which rows a partition holds lies in the offsets, which Spark logs before a batch runs, and in files
that are written once and never changed. So a batch that is replayed, under whatever options, brings the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from millstream.errors import InvalidArgument

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ChangeOffset:
    """The place behind everything up to ``position``, and behind the first ``chunks`` of snapshot ``generation``.

    A batch either moves the position or reads chunks, never both.
    """

    server: str
    """Which server and database the position is one of."""
    position: int
    generation: int = 0
    """Which snapshot plan the chunks belong to; 0: there was none yet."""
    chunks: int = 0
    lanes: int = 1
    """How many partitions the batch that ends here has, if it moves the position."""
    mark: str = ""
    """What the log calls the place, to know it again (MariaDB: the last transaction's GTID); empty: nothing."""

    def to_json(self) -> dict[str, Any]:
        told = {
            "version": _VERSION,
            "server": self.server,
            "position": self.position,
            "generation": self.generation,
            "chunks": self.chunks,
            "lanes": self.lanes,
        }
        return {**told, "mark": self.mark} if self.mark else told

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> ChangeOffset:
        if told.get("version") != _VERSION:
            allowed = f"an offset of version {_VERSION}; this checkpoint is of another release"
            raise InvalidArgument("the checkpoint's offset", told, allowed)
        where = told["server"], told["position"], told["generation"], told["chunks"], told["lanes"]
        return cls(*where, mark=told.get("mark", ""))

    def moved(self, **to: Any) -> ChangeOffset:
        return replace(self, **to)
