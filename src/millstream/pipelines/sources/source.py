"""What every source is: a part of the spec that opens as a streaming frame of events.

Here database change sources will come in: one more class with these methods, listed in ``sources/__init__``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from millstream.pipelines.spec.part import Name, Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ids = Literal["unique", "repeat in a batch", "repeat"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a source is told when it opens. ``address`` turns a URI into what may be shown in a plan (no password)."""

    pipeline: str
    tenant: str
    max_events: int
    max_bytes: int | None = None
    partitions: int = 2
    addresses: dict[str, str] | None = None

    def address(self, uri: str) -> str:
        return (self.addresses or {}).get(uri, uri)


class SourceConfig(Part):
    """``id`` is what events call their source; by default what it reads from."""

    id: Name | None = None


class Source(Part):
    """``reorders``: a replay, or a restart on another cluster, may cut or order rows differently."""

    reorders: ClassVar[bool] = False

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        raise AssertionError("every source has its own")

    def ids(self) -> Ids:
        """How far ids identify: ``unique`` by themselves; ``repeat in a batch`` where equal rows of one file share
        one; ``repeat`` where equal rows of different batches do too."""
        return "unique"

    def can_fail(self) -> bool:
        """Whether an event can leave this source as a dead letter."""
        return True

    def endless(self) -> bool:
        """Whether reading what is there never ends, so that ``--once`` makes no sense."""
        return False

    def fields(self) -> dict[str, frozenset[str]] | None:
        """The fields of each table's rows, where they are known before anything runs."""
        return None

    def behind(self, opening: Opening, finished: Any) -> int | None:
        """How many entries lie beyond the end of the last finished batch, as Spark has logged it (None: there was none
        yet). None where this source cannot say. Asked while a batch takes long, from a thread of its own."""
        return None

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a checkpoint's offsets to keep their meaning. No secrets."""
        raise AssertionError("every source has its own")
