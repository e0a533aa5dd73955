"""Sinks that Spark writes: files, any of its formats (Kafka, Delta, JDBC, ...), and the first rows on a console.

Files are Parquet with an event's columns, or JSON with one event per line, in a directory per batch. A batch that is
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
    """The form of the documents."""
    rows: Annotated[int, Field(ge=0, le=10_000)] = 20
    """How many rows of each batch are printed."""


class ConsoleSink(Sink):
    """Prints rows. A replayed batch is printed again."""

    idempotent = False
    looks = True
    type: Literal["console"]
    config: ConsoleConfig

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        return self.matching(events, tenant).select(self.config.envelope.column(events).alias("event"), *keep)

    def write(self, rows: DataFrame, write: Write) -> None:
        first_rows = rows.take(self.config.rows + 1)
        for row in first_rows[: self.config.rows]:
            sys.stdout.write(f"{write.sink} batch {write.version}: {printable(row['event'])}\n")
        if len(first_rows) > self.config.rows:
            sys.stdout.write(f"{write.sink} batch {write.version}: ... (rows: {self.config.rows} shows no more)\n")
        sys.stdout.flush()


def printable(text: str) -> str:
    """The text with its control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class FilesSinkConfig(SinkConfig):
    """``schema``: the columns of a row, as Spark writes them (``id bigint, total double``). With it ``before`` and
    ``after`` of a Parquet file have these columns; without it they are JSON texts."""

    path: NonEmpty
    """The directory for the files. Each batch gets a directory of its own."""
    format: Literal["parquet", "json"] = "parquet"
    """The format of the files."""
    envelope: AnyEnvelope = Native()
    """The form of the documents in JSON files."""
    row_schema: NonEmpty | None = Field(None, alias="schema")
    """The columns of a row in Parquet files, such as ``id bigint, total double``. By default ``before`` and ``after``
    are JSON texts."""
    options: dict[str, Text] = Field(default_factory=dict)
    """Options of Spark's writer of this format, such as ``compression``."""

    @model_validator(mode="after")
    def _columns_in_parquet(self) -> FilesSinkConfig:
        if self.row_schema is not None and self.format != "parquet":
            raise PydanticCustomError("schema", "a schema gives columns to Parquet; JSON has none: remove it")
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
        # The path contains the application: after a reset, batches are counted from 0 again, and must not replace the
        # files from before the reset.
        directory = f"{self.config.path}/run={write.application}/batch={write.version}"
        form = "parquet" if self.config.format == "parquet" else "text"
        # Converted last, because the rows are counted, and may wait on disk, as text.
        self._with_columns(rows).write.format(form).mode("overwrite").options(**self.config.options).save(directory)


class SparkSinkConfig(SinkConfig):
    """With an ``envelope``, rows are ``key`` and ``value`` (Kafka: always); without, an event's columns."""

    format: NonEmpty
    """The name of the Spark format, such as ``kafka``, ``delta`` or ``jdbc``."""
    options: dict[str, Text] = Field(default_factory=dict)
    """Options of the format."""
    envelope: AnyEnvelope | None = None
    """Writes rows of ``key`` and ``value`` with a document in this form; always so for Kafka. By default rows have the
    columns of an event."""
    path: NonEmpty | None = None
    """The path to save to, for a format that needs one."""


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
