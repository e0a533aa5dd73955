"""Files as a sink: Parquet with an event's columns, or JSON with one event a line; a directory for each batch.

A batch that is written again replaces its own directory, so a replay adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelopes import AnyEnvelope, Native
from millstream.pipelines.events import without_marks
from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write
from millstream.pipelines.spec.part import NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENT_COLUMNS = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms")


class FilesSinkConfig(SinkConfig):
    """``schema``: the columns of a row, as Spark writes them (``id bigint, total double``). With it ``before`` and
    ``after`` of a Parquet file have these columns; without it they are JSON texts."""

    path: NonEmpty
    format: Literal["parquet", "json"] = "parquet"
    envelope: AnyEnvelope = Native()
    row_schema: NonEmpty | None = Field(None, alias="schema")
    options: dict[str, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _columns_in_parquet(self) -> FilesSinkConfig:
        if self.row_schema is not None and self.format != "parquet":
            raise PydanticCustomError("schema", "a schema gives columns to Parquet; JSON has none: take it away")
        return self


class FilesSink(Sink):
    type: Literal["files"]
    config: FilesSinkConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        rows = self.matching(events, tenant)
        if self.config.format == "parquet":
            return without_marks(rows).select(*EVENT_COLUMNS, *keep)
        return rows.select(self.config.envelope.column(rows).alias("value"), *keep)

    def _with_columns(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        schema = self.config.row_schema
        return rows if schema is None else rows.withColumns({n: F.from_json(n, schema) for n in ("before", "after")})

    def write(self, rows: DataFrame, write: Write) -> None:
        # The application is part of the path: after a reset batches are counted from 0 again, and must not replace
        # what an earlier life of the pipeline wrote.
        directory = f"{self.config.path}/run={write.application}/batch={write.version}"
        form = "parquet" if self.config.format == "parquet" else "text"
        # Only here: on the way the rows are counted, and may wait on disk, as texts.
        self._with_columns(rows).write.format(form).mode("overwrite").options(**self.config.options).save(directory)
