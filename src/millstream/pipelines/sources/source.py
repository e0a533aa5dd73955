"""The base class of sources: a part of the spec that opens as a streaming frame of events.

A new source is a class with these methods, listed in ``sources/__init__``; one for a database extends
``DatabaseSource``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from millstream.pipelines.redis_address import RedisAddress, SecretFiles
from millstream.pipelines.spec.part import Name, Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc.mariadb.database import BinlogStatus
    from millstream.cdc.postgres.database import SlotStatus
    from millstream.pipelines.spec.pipeline import PipelineSpec

Ids = Literal["unique", "repeat in a batch", "repeat"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a source needs to open. ``partitions`` is the number of tasks that run at once."""

    pipeline: str
    tenant: str
    max_events: int
    max_bytes: int | None = None
    partitions: int = 2
    secrets: SecretFiles = field(default_factory=SecretFiles)
    checkpoint: str = "checkpoint"
    """The location of the checkpoint, a path or URI, for a source that keeps files of its own there."""
    gateway_file: str | None = None
    """For a checkpoint in a store: a private file that ``millstream.storage.connect`` reads, for Spark's planning
    processes. None for a local directory."""
    tasks_are_local: bool = True
    """Whether tasks run on the driver's host (a local master), and so can read the driver's files."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something in the source that only this pipeline needs: a description, how to remove it now, and ``later``, how to
    remove it without the checkpoint."""

    description: str
    remove: Callable[[], None]
    later: str


class SourceConfig(Part):
    """Options of every source."""

    id: Name | None = None
    """The name of the source in events. By default the name of what it reads."""


class Source(Part):
    """``reorders``: a replay, or a restart on another cluster, may split or order rows differently. ``bounds``: which
    of ``batch.max_events`` and ``batch.max_bytes`` it supports. ``has_slot``: a database keeps log for this source, and
    the size must be watched. ``has_log``: a database keeps log by its own rules, and may purge needed parts."""

    reorders: ClassVar[bool] = False
    has_slot: ClassVar[bool] = False
    has_log: ClassVar[bool] = False
    bounds: ClassVar[frozenset[str]] = frozenset({"max_events"})
    type: str
    config: SourceConfig

    def addresses(self) -> Iterator[RedisAddress]:
        """The Redis servers that it connects to. Spark does not receive their passwords; dead letters may go there."""
        yield from ()

    def reads_stream(self, address: RedisAddress, stream: str) -> bool:
        """Whether entries that are written to this stream are read as events."""
        return False

    def takes_ids_of_documents(self) -> bool:
        """Whether an event is identified by the id in its document. Otherwise producers may repeat these ids."""
        return False

    def secrets(self) -> Iterator[str]:
        """Other addresses that contain a password: no process of Spark may inherit them."""
        yield from ()

    def problems_before_start(self, pipeline: str, *, begun: bool, master: str) -> Iterator[str]:
        """Problems that prevent a start, found before Spark starts. ``begun``: it continues from a checkpoint."""
        yield from ()

    def finished(self, opening: Opening, end: Any) -> None:
        """Called when the query has ended, with the end of its last committed batch, which Spark does not report."""

    def slot_status(self, pipeline: str) -> SlotStatus | None:
        """The state of the replication slot. May raise; called from a separate thread."""
        return None

    def log_status(self, end: Any) -> BinlogStatus | None:
        """The state of the log relative to the end of the last committed batch (None: no batch yet). May raise."""
        return None

    def leftover(self, pipeline: str) -> Leftover | None:
        """What a reset leaves in the source, such as a slot that retains log; None: nothing."""
        return None

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Settings of the spec that this source does not support: the path, and the reason."""
        for name in sorted({"max_events", "max_bytes"} & spec.batch.model_fields_set - self.bounds):
            able = f"it takes {', '.join(sorted(self.bounds))}" if self.bounds else self.other_bounds()
            yield ("batch", name), f"a source of type {self.type} cannot bound a batch by this; {able}"

    def other_bounds(self) -> str:
        """What limits a batch instead, for a source that supports neither setting."""
        return "leave it out"

    def order(self) -> str | None:
        """The order of the source that rows keep in a sink's stream; None if they keep none."""
        return None

    @abstractmethod
    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        """A streaming DataFrame of the source's rows."""

    def ids(self) -> Ids:
        """The uniqueness of ids: ``unique``; ``repeat in a batch`` if equal rows of one file share one; ``repeat`` if
        equal rows of different batches do, too."""
        return "unique"

    def can_fail(self) -> bool:
        """Whether this source can turn an event into a dead letter."""
        return True

    def endless(self) -> bool:
        """Whether reading the available rows never ends, so that ``--once`` is useless."""
        return False

    def is_finite(self) -> bool:
        """Whether the source has a last row, after which a pipeline can end; see ``is_exhausted``."""
        return False

    def is_exhausted(self, end: Any) -> bool:
        """Whether no row can ever follow ``end``, where the last committed batch ended, as Spark has logged it."""
        return False

    def fields(self) -> dict[str, frozenset[str]] | None:
        """The fields of each table's rows, if they are known before the start."""
        return None

    def behind(self, opening: Opening, finished: Any) -> int | None:
        """The number of entries after the end of the last finished batch, as Spark has logged it (None: no batch yet).
        None if this source does not know. Called from a separate thread while a batch takes long."""
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The settings that must not change, or a checkpoint's offsets lose their meaning. No secrets."""
