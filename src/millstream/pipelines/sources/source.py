"""What every source is: a part of the spec that opens as a streaming frame of events.

A new one is one more class with these methods, listed in ``sources/__init__``; one that follows a database begins with
``DatabaseSource``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from millstream.pipelines.redis_address import RedisAddress, SecretFiles
from millstream.pipelines.spec.part import Name, Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc import BinlogStatus, SlotStatus
    from millstream.pipelines.spec.pipeline import PipelineSpec

Ids = Literal["unique", "repeat in a batch", "repeat"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a source is told when it opens. ``partitions`` is how many tasks run at once."""

    pipeline: str
    tenant: str
    max_events: int
    max_bytes: int | None = None
    partitions: int = 2
    secrets: SecretFiles = field(default_factory=SecretFiles)
    checkpoint: str = "checkpoint"
    """The pipeline's directory, for a source that keeps files of its own beside Spark's."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in the source that only this pipeline needs: what it is, how to be rid of it now, and ``later``, for
    whoever keeps it: a reset finds it by the checkpoint, which is gone then."""

    what: str
    remove: Callable[[], None]
    later: str


class SourceConfig(Part):
    """``id`` is what events call their source; by default what it reads from."""

    id: Name | None = None


class Source(Part):
    """``reorders``: a replay, or a restart on another cluster, may cut or order rows differently. ``bounds``: which of
    the settings ``batch.max_events`` and ``batch.max_bytes`` it can honour. ``has_slot``: a database keeps log for it,
    which somebody should watch; ``has_log``: one keeps log by its own rules, and may purge what is still needed."""

    reorders: ClassVar[bool] = False
    has_slot: ClassVar[bool] = False
    has_log: ClassVar[bool] = False
    bounds: ClassVar[frozenset[str]] = frozenset({"max_events"})
    type: str
    config: SourceConfig

    def addresses(self) -> Iterator[RedisAddress]:
        """The Redis servers that it connects to: their passwords are kept from Spark, and dead letters may go there."""
        yield from ()

    def secrets(self) -> Iterator[str]:
        """Other addresses of its own that hold a password: no process of Spark's may inherit them."""
        yield from ()

    def problems_before_start(self, pipeline: str, *, begun: bool, master: str) -> Iterator[str]:
        """What stands in the way, said before Spark starts. ``begun``: it goes on from a checkpoint."""
        yield from ()

    def finished(self, opening: Opening, end: Any) -> None:
        """The query has ended, and ``end`` is where its last committed batch did: Spark itself does not say so."""

    def slot_status(self, pipeline: str) -> SlotStatus | None:
        """How the slot stands that the database keeps log for. May raise; asked from a thread of its own."""
        return None

    def log_status(self, end: Any) -> BinlogStatus | None:
        """How the log stands beside where the last committed batch ended (None: there was none yet). May raise."""
        return None

    def leftover(self, pipeline: str) -> Leftover | None:
        """What a pipeline that is reset leaves in its source, at somebody's cost; None: nothing."""
        return None

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """What of the spec this source cannot honour: where it stands, and why."""
        for name in sorted({"max_events", "max_bytes"} & spec.batch.model_fields_set - self.bounds):
            able = f"it takes {', '.join(sorted(self.bounds))}" if self.bounds else self.other_bounds()
            yield ("batch", name), f"a source of type {self.type} cannot bound a batch by this; {able}"

    def other_bounds(self) -> str:
        """What bounds a batch instead, for a source that honours neither setting."""
        return "leave it out"

    def order(self) -> str | None:
        """Whether rows reach a sink's stream in the source's order: how far they do; None where they may not."""
        return None

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
