"""Any Spark format as a sink, with its options: Kafka, Delta, JDBC, ...

Delta takes ``txnAppId`` and ``txnVersion`` and skips a batch that it has; for other formats a replay can repeat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from millstream.pipelines.envelopes import AnyEnvelope, Native
from millstream.pipelines.events import without_marks
from millstream.pipelines.sinks.files import EVENT_COLUMNS
from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write
from millstream.pipelines.spec.part import NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class SparkSinkConfig(SinkConfig):
    """With an ``envelope``, rows are ``key`` and ``value`` (Kafka: always); without, an event's columns."""

    format: NonEmpty
    options: dict[str, Text] = Field(default_factory=dict)
    envelope: AnyEnvelope | None = None
    path: NonEmpty | None = None


class SparkSink(Sink):
    idempotent = False
    type: Literal["spark"]
    config: SparkSinkConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        from pyspark.sql import functions as F

        rows = self.matching(events, tenant)
        envelope = self.config.envelope or (Native() if self.config.format == "kafka" else None)
        if envelope is None:
            return without_marks(rows).select(*EVENT_COLUMNS, *keep)
        return rows.select(F.col("key"), envelope.column(rows).alias("value"), *keep)

    def write(self, rows: DataFrame, write: Write) -> None:
        transaction = {"txnAppId": f"{write.application}.{write.sink}", "txnVersion": str(write.version)}
        options = (transaction if self.config.format == "delta" else {}) | self.config.options
        writer = rows.write.format(self.config.format).mode("append").options(**options)
        if self.config.path:
            writer.save(self.config.path)
        else:
            writer.save()
