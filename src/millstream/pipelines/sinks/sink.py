"""The base class of sinks: a part of the spec that converts events to rows and writes them so that a replay adds
nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from millstream.pipelines.processors.filter import Match
from millstream.pipelines.redis_address import RedisAddress, SecretFiles
from millstream.pipelines.spec.part import Name, Part, Size
from millstream.spark.sink_options import Delivered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.sink_queue import StoredBatch
    from millstream.pipelines.spec.pipeline import PipelineSpec

Delivery = Literal["exactly_once", "exactly_once_by_event_id"]


def unfenced(address: RedisAddress) -> str:
    """The option ``fence`` of a write that no lease protects."""
    return "none"


@dataclass(frozen=True, slots=True)
class Write:
    """The identity of one write: the same (application, version, sink) again adds nothing. ``version`` is the batch.

    ``fence`` returns the option ``fence`` of a write to an address: a process that lost its lease writes nothing there.
    ``unobserved``: the rows may be evaluated more than once, because Spark counts nothing while it evaluates them.
    """

    application: str
    version: int
    sink: str
    delivery: Delivery = "exactly_once"
    secrets: SecretFiles = field(default_factory=SecretFiles)
    fence: Callable[[RedisAddress], str] = unfenced
    unobserved: bool = False

    def event_marker(self, event_id: Column) -> Column:
        """The id that a stream remembers for an event. It names the checkpoint: another pipeline, or this one after a
        reset, may write an event with the same id into the same stream."""
        from pyspark.sql import functions as F

        return F.concat(F.lit(f"{self.application}\x00"), event_id)


NOTHING = Delivered()

TIME = "_event_ts_ms"
"""The column with the event's time, next to a sink's rows; no sink writes it."""


class SinkQueueConfig(Part):
    """The queue of an optional sink, in the checkpoint."""

    max_bytes: Size = 1 << 30
    """The maximum size of the queue."""
    min_free: Size = 64 << 20
    """The free space that must stay on the disk or store."""
    overflow: Literal["drop_oldest", "block"] = "drop_oldest"
    """When the queue is full: ``drop_oldest`` drops the oldest batches, logged and counted; ``block`` makes the
    pipeline wait."""


class SinkConfig(Part):
    """Options of every sink."""

    id: Name
    """The name of the sink in metrics, logs and the checkpoint. Unique in the spec."""
    required: bool = True
    """true: the checkpoint waits for this sink. false: it never delays other sinks, and its batches wait in a queue."""
    queue: SinkQueueConfig = SinkQueueConfig()
    """The queue of an optional sink, in the checkpoint."""


class Sink(Part):
    """``idempotent``: a batch that is written again adds nothing. ``looks``: the sink may not read a batch to its end.
    ``counts``: it returns what it has written, and also receives the events' times."""

    idempotent: ClassVar[bool] = True
    looks: ClassVar[bool] = False
    counts: ClassVar[bool] = False
    type: str
    config: SinkConfig
    filter: Match | None = None
    """Which events this sink takes. By default all."""

    def addresses(self) -> Iterator[RedisAddress]:
        """The Redis servers that it connects to. Spark does not receive their passwords; dead letters may go there."""
        yield from ()

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """The templates in its settings, each with its path."""
        yield from ()

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Settings that the rest of the spec makes impossible or useless: the path, and the reason."""
        if "queue" in self.config.model_fields_set and (self.config.required or spec.commit_policy == "all"):
            yield ("config", "queue"), "this sink gates the checkpoint and has no queue; give required: false, or none"

    @abstractmethod
    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        """The events, none of which failed, as the rows that this sink writes; ``keep`` are columns of the event to
        keep next to them."""

    def misses(self, tenant: str) -> Column | None:
        """Whether this sink has no stream for an event that it should take; None if it has one for all."""
        return None

    def unroutable(self, events: DataFrame, tenant: str) -> DataFrame | None:
        """The events for which this sink has no stream, marked with the reason; None if it has one for all."""
        return None

    def learn_from(self, error: BaseException, events: DataFrame, tenant: str) -> bool:
        """After a permanent refusal of a batch: whether this sink can now name the events that caused it, so that they
        become dead letters and the batch can be written again."""
        return False

    @abstractmethod
    def write(self, rows: DataFrame, write: Write) -> Delivered | None:
        """Writes a batch through Spark. Raises unless the batch is known to be complete. None: it does not count."""

    def shape(self) -> str | None:
        """Sinks with one shape take the same rows and can be written in one pass; None: always written alone."""
        return None

    def write_beside(self, rows: DataFrame, write: Write, further: Sequence[tuple[Sink, Write]]) -> Delivered:
        """``write`` for this sink and further sinks with its shape: Spark computes the rows once.

        Raises if one of them is not known to be complete; the others may be.
        """
        raise TypeError(f"{type(self).__name__} cannot be written in one pass with other sinks: it defines no shape")

    def deliver(self, session: SparkSession, batch: StoredBatch, write: Write) -> Delivered:
        """Writes a batch of the sink's queue, and counts it."""
        from pyspark.sql import functions as F

        rows = session.read.parquet(*batch.uris)
        self.write(rows, write)
        # A second pass, over the stored files: a sink that looks at some rows only could not count them all.
        counted = rows.agg(F.count(F.lit(1)).alias("rows"), text_bytes(rows.columns).alias("bytes")).first()
        assert counted is not None, "an aggregate without groups has one row"
        return Delivered(int(counted["rows"]), int(counted["bytes"]))

    def probe(self) -> None:
        """A cheap check from the driver before a retry. Raises the error that makes the retry useless."""

    def matching(self, events: DataFrame, tenant: str) -> DataFrame:
        return events if self.filter is None else events.where(self.filter.column(tenant))


def text_bytes(columns: Collection[str]) -> Column:
    """The total bytes of a sink's rows: of the envelope if there is one, else of before and after."""
    from pyspark.sql import functions as F

    texts = next(([name] for name in ("event", "value") if name in columns), ["before", "after"])
    lengths = [F.coalesce(F.sum(F.octet_length(name)), F.lit(0)) for name in texts if name in columns]
    return sum(lengths[1:], start=lengths[0]) if lengths else F.lit(0)
