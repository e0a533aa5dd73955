"""The offset of a change source, as Spark logs it: a log position, a snapshot generation, and a number of chunks.

The rows of a partition depend only on the offsets, which Spark logs before a batch runs, and on files that are written
once and never changed. So a replayed batch has the same rows, even if the options have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from millstream.errors import InvalidArgument

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ChangeOffset:
    """All changes up to ``position`` and the first ``chunks`` of snapshot ``generation`` are processed.

    A batch either moves the position or reads chunks, never both.
    """

    server: str
    """Identifies the server and database in which the position is valid."""
    position: int
    generation: int = 0
    """The snapshot plan that the chunks belong to; 0: no snapshot yet."""
    chunks: int = 0
    partitions: int = 1
    """Number of Spark partitions of the batch that ends here, if it moves the position. Stored as ``lanes``."""
    gtids: str = ""
    """MariaDB: the GTIDs at the position, which verify it after a restart; otherwise empty. Stored as ``mark``."""

    def to_json(self) -> dict[str, Any]:
        document = {
            "version": _VERSION,
            "server": self.server,
            "position": self.position,
            "generation": self.generation,
            "chunks": self.chunks,
            "lanes": self.partitions,
        }
        return {**document, "mark": self.gtids} if self.gtids else document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ChangeOffset:
        if document.get("version") != _VERSION:
            allowed = f"an offset of version {_VERSION}; this checkpoint is of another release"
            raise InvalidArgument("the checkpoint's offset", document, allowed)
        fields = document["server"], document["position"], document["generation"], document["chunks"], document["lanes"]
        return cls(*fields, gtids=document.get("mark", ""))

    def moved(self, **to: Any) -> ChangeOffset:
        return replace(self, **to)
