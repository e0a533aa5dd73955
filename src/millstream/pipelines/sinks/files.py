"""Files as a sink: Parquet with an event's columns, or JSON with one event a line; a directory for each batch.

A batch that is written again replaces its own directory, so a replay adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from millstream.pipelines.envelopes import AnyEnvelope, Native
from millstream.pipelines.events import without_marks
from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write
from millstream.pipelines.spec.part import NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENT_COLUMNS = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms")


class FilesSinkConfig(SinkConfig):
    path: NonEmpty
    format: Literal["parquet", "json"] = "parquet"
    envelope: AnyEnvelope = Native()
    options: dict[str, Text] = Field(default_factory=dict)


class FilesSink(Sink):
    type: Literal["files"]
    config: FilesSinkConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        rows = self.matching(events, tenant)
        if self.config.format == "parquet":
            return without_marks(rows).select(*EVENT_COLUMNS, *keep)
        return rows.select(self.config.envelope.column(rows).alias("value"), *keep)

    def write(self, rows: DataFrame, write: Write) -> None:
        # The application is part of the path: after a reset batches are counted from 0 again, and must not replace
        # what an earlier life of the pipeline wrote.
        directory = f"{self.config.path}/run={write.application}/batch={write.version}"
        form = "parquet" if self.config.format == "parquet" else "text"
        rows.write.format(form).mode("overwrite").options(**self.config.options).save(directory)
