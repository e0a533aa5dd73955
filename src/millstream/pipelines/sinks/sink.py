"""What every sink is: a part of the spec that turns events into its own rows and writes them so that a replay adds
nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from millstream.pipelines.processors.filter import Match
from millstream.pipelines.redis_address import RedisAddress, SecretFiles
from millstream.pipelines.spec.part import Name, Part, Size
from millstream.spark import Delivered

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.spec.pipeline import PipelineSpec

Delivery = Literal["exactly_once", "exactly_once_by_event_id"]


@dataclass(frozen=True, slots=True)
class Write:
    """The identity of one write: the same (application, version, sink) again adds nothing. ``version`` is the batch."""

    application: str
    version: int
    sink: str
    delivery: Delivery = "exactly_once"
    secrets: SecretFiles = field(default_factory=SecretFiles)


NOTHING = Delivered()

TIME = "_event_ts_ms"
"""The column beside a sink's rows that holds the event's time; no sink writes it."""


class Spooling(Part):
    """Where an optional sink's batches wait: on disk, under the checkpoint, up to ``max_bytes``, and as long as the
    disk has ``min_free`` left.

    ``overflow`` when it is full: ``drop_oldest`` loses what waited longest, loudly and counted; ``block`` makes the
    pipeline wait, as a required sink would.
    """

    max_bytes: Size = 1 << 30
    min_free: Size = 64 << 20
    overflow: Literal["drop_oldest", "block"] = "drop_oldest"


class SinkConfig(Part):
    """``required`` gates the checkpoint. An optional sink never holds the others up: its batches wait on disk."""

    id: Name
    required: bool = True
    spool: Spooling = Spooling()


class Sink(Part):
    """``idempotent``: a batch that is written again adds nothing, whatever happened in between. ``looks``: it may not
    read a batch to its end. ``counts``: it says what it has written, and is given the events' times too."""

    idempotent: ClassVar[bool] = True
    looks: ClassVar[bool] = False
    counts: ClassVar[bool] = False
    type: str
    config: SinkConfig
    filter: Match | None = None

    def addresses(self) -> Iterator[RedisAddress]:
        """The Redis servers that it connects to: their passwords are kept from Spark, and dead letters may go there."""
        yield from ()

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Where templates stand in its settings, and what they are."""
        yield from ()

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """What of its settings the rest of the spec makes impossible or useless: where it stands, and why."""
        if "spool" in self.config.model_fields_set and (self.config.required or spec.commit_policy == "all"):
            yield ("config", "spool"), "this sink gates the checkpoint and has no spool; give required: false, or none"

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        """The events, none of which failed, as the rows that this sink writes; ``keep`` are columns of the event to
        leave beside them."""
        raise AssertionError("every sink has its own")

    def misses(self, tenant: str) -> Column | None:
        """Whether this sink has no place for an event that it should take; None where it has one for all."""
        return None

    def unroutable(self, events: DataFrame, tenant: str) -> DataFrame | None:
        """The events for which this sink has no place, marked with why; None where it has one for all."""
        return None

    def write(self, rows: DataFrame, write: Write) -> Delivered | None:
        """Writes a batch, through Spark. Raises where it is not known to be complete. None: it ``counts`` nothing."""
        raise AssertionError("every sink has its own")

    def shape(self) -> str | None:
        """Sinks of one shape take the same rows, and can be written in one pass; None: always on its own."""
        return None

    def write_beside(self, rows: DataFrame, write: Write, others: Sequence[tuple[Sink, Write]]) -> Delivered:
        """``write`` for this sink and others of its shape: Spark makes the rows, and hands them over, once.

        Raises where one of them is not known to be complete; the others may be.
        """
        raise AssertionError("every sink that has a shape has its own")

    def deliver(self, session: SparkSession, directory: Path, write: Write) -> Delivered:
        """Writes a batch that waited on disk, and says how much it was."""
        from pyspark.sql import functions as F

        rows = session.read.parquet(str(directory))
        self.write(rows, write)
        # A second pass, over a local file: a sink that looks at some rows only could not count them all.
        counted = rows.agg(F.count(F.lit(1)).alias("rows"), text_bytes(rows.columns).alias("bytes")).first()
        assert counted is not None, "an aggregate without groups has one row"
        return Delivered(int(counted["rows"]), int(counted["bytes"]))

    def probe(self) -> None:
        """Whether trying again makes sense: raises what stands in the way, cheaply, from the driver."""

    def matching(self, events: DataFrame, tenant: str) -> DataFrame:
        return events if self.filter is None else events.where(self.filter.column(tenant))


def text_bytes(columns: Collection[str]) -> Column:
    """The bytes of a sink's rows, summed: the envelope where there is one, else what was before and after."""
    from pyspark.sql import functions as F

    texts = next(([name] for name in ("event", "value") if name in columns), ["before", "after"])
    lengths = [F.coalesce(F.sum(F.octet_length(name)), F.lit(0)) for name in texts if name in columns]
    return sum(lengths[1:], start=lengths[0]) if lengths else F.lit(0)
