"""What Spark itself reads: directories of JSON, CSV or Parquet files, and any streaming format (Kafka, Delta, ...).

Of files each row is an event, and each file is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.sources.source import Ids, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import SECRET_WORDS, NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.pipelines.spec.pipeline import PipelineSpec


def _ddl(text: str) -> str:
    """A first look without Spark: names and types in pairs. Spark itself says the rest when the pipeline is planned."""
    pairs = [part.split() for part in text.replace(":", " ").split(",")]
    if any(len(pair) < 2 for pair in pairs if "<" not in text and "(" not in text):
        raise PydanticCustomError("schema", "write columns and types, such as: id BIGINT, name STRING")
    return text


class FilesConfig(SourceConfig):
    """``schema`` gives the columns; Parquet files of one kind may do without. JSON without a schema is taken line by
    line as documents, in the given ``envelope`` form."""

    path: NonEmpty
    format: Literal["json", "csv", "parquet"]
    row_schema: Annotated[str, AfterValidator(_ddl)] | None = Field(None, alias="schema")
    envelope: Format = "auto"
    table: NonEmpty | None = None
    options: dict[str, Text] = Field(default_factory=dict)
    max_files: Annotated[int, Field(ge=1)] | None = None


class FilesSource(Source):
    """The id is the file and, within it, the row's number (Parquet) or its content: equal rows of one file are told
    apart by counting, inside the batch. How Spark cuts files into partitions depends on the cluster."""

    type: Literal["files"]
    config: FilesConfig
    reorders = True
    bounds = frozenset({"max_bytes"})

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        yield from super().misfits(spec)
        if self.config.max_files is not None and spec.batch.max_bytes is not None:
            yield (
                ("source", "config", "max_files"),
                "Spark takes one bound: give this or batch.max_bytes",
            )

    def ids(self) -> Ids:
        return "unique" if self.config.format == "parquet" else "repeat in a batch"

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from pyspark.sql import functions as F

        c = self.config
        as_documents = c.format == "json" and c.row_schema is None
        reader = session.readStream.format("text" if as_documents else c.format).options(**c.options)
        if c.max_files is not None:
            reader = reader.option("maxFilesPerTrigger", c.max_files)
        elif opening.max_bytes is not None:
            reader = reader.option("maxBytesPerTrigger", opening.max_bytes)
        if c.row_schema is not None:
            reader = reader.schema(c.row_schema)
        elif not as_documents:
            reader = reader.schema(getattr(session.read.options(**c.options), c.format)(c.path).schema)
        rows = reader.load(c.path)
        shown = F.to_json(F.struct(*(F.col(f"`{name}`") for name in rows.columns)), {"ignoreNullFields": "false"})
        text = F.col("value") if as_documents else shown
        # row_index exists for Parquet alone; elsewhere the content stands in for it.
        within = F.col("_metadata.row_index").cast("string") if c.format == "parquet" else F.sha1(text)
        position = SourcePosition(
            id=F.concat_ws(":", F.col("_metadata.file_path"), within),
            ts_ms=F.unix_millis(F.col("_metadata.file_modification_time")),
            name=F.lit(c.id or "files"),
            table=F.lit(c.table) if c.table else F.lit(c.id or "files"),
        )
        rows = rows.where(F.length(F.trim("value")) > 0) if as_documents else rows
        return read_documents(rows, text, position, c.envelope if as_documents else "row")

    def identity(self) -> dict[str, Any]:
        return {"path": self.config.path, "format": self.config.format}


class SparkConfig(SourceConfig):
    """``value`` is an SQL expression for the document; without it, a column ``value`` of Kafka, else the whole row.
    ``event_id`` is one for a unique id; without it, Kafka's topic, partition and offset, else the row's content."""

    format: NonEmpty
    options: dict[str, Text] = Field(default_factory=dict)
    row_schema: NonEmpty | None = Field(None, alias="schema")
    path: NonEmpty | None = None
    value: NonEmpty | None = None
    event_id: NonEmpty | None = None
    ts: NonEmpty | None = None
    envelope: Format = "auto"
    table: NonEmpty | None = None


class SparkSource(Source):
    """Where the id is the row's content, equal rows are told apart by counting within their batch, and by the batch."""

    type: Literal["spark"]
    config: SparkConfig
    reorders = True
    bounds = frozenset()

    def other_bounds(self) -> str:
        return "use the format's own options, such as maxOffsetsPerTrigger or maxFilesPerTrigger"

    def ids(self) -> Ids:
        return "unique" if self.config.event_id or self.config.format == "kafka" else "repeat"

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        reader = session.readStream.format(self.config.format).options(**self.config.options)
        if self.config.row_schema:
            reader = reader.schema(self.config.row_schema)
        return self.understood(reader.load(self.config.path) if self.config.path else reader.load())

    def understood(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        c = self.config
        kafka = c.format == "kafka"
        whole = F.to_json(F.struct(*(F.col(f"`{name}`") for name in rows.columns)))
        default = F.col("value").cast("string") if kafka else whole
        text = F.expr(c.value).cast("string") if c.value else default
        if c.event_id:
            identity = F.expr(c.event_id).cast("string")
        else:
            identity = F.concat_ws(":", "topic", "partition", "offset") if kafka else F.sha1(whole)
        now = F.unix_millis(F.current_timestamp())
        position = SourcePosition(
            id=F.concat_ws(":", F.lit(c.id or c.format), identity),
            ts_ms=F.expr(c.ts).cast("bigint") if c.ts else (F.unix_millis("timestamp") if kafka else now),
            name=F.lit(c.id or c.format),
            table=F.col("topic") if kafka and not c.table else F.lit(c.table or c.id or c.format),
            key=F.col("key").cast("string") if kafka else None,
        )
        return read_documents(rows, text, position, c.envelope if kafka or c.value else "row")

    def identity(self) -> dict[str, Any]:
        safe = {k: v for k, v in self.config.options.items() if not any(word in k.lower() for word in SECRET_WORDS)}
        return {"format": self.config.format, "options": safe, "path": self.config.path}
