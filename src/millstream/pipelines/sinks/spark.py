"""What Spark itself writes: files, any of its formats (Kafka, Delta, JDBC, ...), and the first rows on a console.

Files are Parquet with an event's columns, or JSON with one event a line, in a directory for each batch. A batch that is
written again replaces its own directory, so a replay adds nothing. Delta takes ``txnAppId`` and ``txnVersion`` and
skips a batch that it has; for other formats a replay can repeat rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelopes import AnyEnvelope, Native
from millstream.pipelines.events import without_marks
from millstream.pipelines.sinks.sink import Sink, SinkConfig, Write
from millstream.pipelines.spec.part import NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENT_COLUMNS = ("id", "key", "name", "db", "schema", "table", "op", "before", "after", "ts_ms")


class ConsoleConfig(SinkConfig):
    envelope: AnyEnvelope = Native()
    rows: Annotated[int, Field(ge=0, le=10_000)] = 20


class ConsoleSink(Sink):
    """A replayed batch is shown again: a terminal cannot take back."""

    idempotent = False
    looks = True
    type: Literal["console"]
    config: ConsoleConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        return self.matching(events, tenant).select(self.config.envelope.column(events).alias("event"), *keep)

    def write(self, rows: DataFrame, write: Write) -> None:
        shown = rows.take(self.config.rows + 1)
        for row in shown[: self.config.rows]:
            sys.stdout.write(f"{write.sink} batch {write.version}: {printable(row['event'])}\n")
        if len(shown) > self.config.rows:
            sys.stdout.write(f"{write.sink} batch {write.version}: ... (rows: {self.config.rows} shows no more)\n")
        sys.stdout.flush()


def printable(text: str) -> str:
    """Nothing in the data may steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
