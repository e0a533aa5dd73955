"""Sources that Spark reads: directories of JSON, CSV or Parquet files, and any streaming format (Kafka, Delta, ...).

Each row of a file is an event, and each file is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.events import LAST_MS
from millstream.pipelines.sources.source import Ids, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import SECRET_WORDS, NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.spec.pipeline import PipelineSpec


_BAD_LINE = "_millstream_bad_line"


def whole_row(names: Sequence[str]) -> Column:
    """All columns as one struct, whatever their names contain."""
    from pyspark.sql import functions as F

    return F.struct(*(F.col("`" + name.replace("`", "``") + "`") for name in names))


def _ddl(text: str) -> str:
    """A first check without Spark: pairs of names and types. Spark checks the rest when the pipeline is planned."""
    pairs = [part.split() for part in text.replace(":", " ").split(",")]
    if any(len(pair) < 2 for pair in pairs if "<" not in text and "(" not in text):
        raise PydanticCustomError("schema", "write columns and types, such as: id BIGINT, name STRING")
    return text


class FilesConfig(SourceConfig):
    """Options of the source ``files``."""

    path: NonEmpty
    """The directory with the files. Each file is read once."""
    format: Literal["json", "csv", "parquet"]
    """The format of the files."""
    row_schema: Annotated[str, AfterValidator(_ddl)] | None = Field(None, alias="schema")
    """The columns and their types, such as ``id BIGINT, name STRING``. By default Spark infers them; JSON without it is
    read as one document per line."""
    envelope: Format = "auto"
    """The form of the documents of JSON without a ``schema``. ``auto`` detects it for each document."""
    table: NonEmpty | None = None
    """The table of events whose document names none. By default the name of the source."""
    options: dict[str, Text] = Field(default_factory=dict)
    """Options of Spark's reader of this format, such as ``header`` for CSV."""
    max_files: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of files in one batch. Give this or ``batch.max_bytes``."""


class FilesSource(Source):
    """Files in a directory. The id is the file and the row's number (Parquet) or its content: equal rows of a file are
    numbered within the batch. How Spark splits files into partitions depends on the cluster."""

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
        checks_lines = not as_documents and c.format != "parquet" and "mode" not in c.options
        schema = c.row_schema
        if schema is None and not as_documents:
            inferred = getattr(session.read.options(**c.options), c.format)(c.path).schema
            reader = reader.schema(inferred.add(_BAD_LINE, "string") if checks_lines else inferred)
        elif schema is not None:
            reader = reader.schema(f"{schema}, {_BAD_LINE} STRING" if checks_lines else schema)
        if checks_lines:
            # Spark converts a line that does not fit the schema to nulls. Its text in this column identifies it.
            reader = reader.options(mode="PERMISSIVE", columnNameOfCorruptRecord=_BAD_LINE)
        rows = reader.load(c.path)
        names = [name for name in rows.columns if name != _BAD_LINE]
        document = F.to_json(whole_row(names), {"ignoreNullFields": "false"})
        text = F.col("value") if as_documents else document
        bad_line = F.col(_BAD_LINE) if checks_lines else F.lit(None)
        text = F.coalesce(bad_line, text) if checks_lines else text
        # row_index exists only for Parquet; other formats use the content instead.
        within = F.col("_metadata.row_index").cast("string") if c.format == "parquet" else F.sha1(text)
        position = SourcePosition(
            id=F.concat_ws(":", F.col("_metadata.file_path"), within),
            ts_ms=F.unix_millis(F.col("_metadata.file_modification_time")),
            name=F.lit(c.id or "files"),
            table=F.lit(c.table) if c.table else F.lit(c.id or "files"),
            refused=F.when(bad_line.isNotNull(), F.lit("the line does not fit the schema")).when(
                # Spark decodes these formats itself, and replaces bytes that are not UTF-8 by this character.
                F.lit(c.format != "parquet" and not as_documents) & F.contains(text, F.lit("\ufffd")),
                F.lit("the line is not valid UTF-8, or holds U+FFFD, which stands for such bytes"),
            ),
        )
        rows = rows.where(F.length(F.trim("value")) > 0) if as_documents else rows
        return read_documents(rows, text, position, c.envelope if as_documents else "row")

    def identity(self) -> dict[str, Any]:
        return {"path": self.config.path, "format": self.config.format}


class SparkConfig(SourceConfig):
    """Options of the source ``spark``."""

    format: NonEmpty
    """The name of the Spark format, such as ``kafka`` or ``delta``."""
    options: dict[str, Text] = Field(default_factory=dict)
    """Options of the format."""
    row_schema: NonEmpty | None = Field(None, alias="schema")
    """The columns and their types, for a format that needs them."""
    path: NonEmpty | None = None
    """The path to load, for a format that needs one."""
    value: NonEmpty | None = None
    """An SQL expression for the document. By default the column ``value`` of Kafka, or the whole row."""
    event_id: NonEmpty | None = None
    """An SQL expression for a unique id. By default topic, partition and offset of Kafka, or the content of the row. A
    row for which it is null or empty is a dead letter."""
    ts: NonEmpty | None = None
    """An SQL expression for the time of an event, in milliseconds since 1970. A row for which it is no such time is a
    dead letter. By default the timestamp of Kafka, or the current time."""
    envelope: Format = "auto"
    """The form of the documents. ``auto`` detects it for each document."""
    table: NonEmpty | None = None
    """The table of events whose document names none. By default the topic of Kafka, or the name of the source."""


class SparkSource(Source):
    """Any streaming format of Spark. If the id is computed from the row, equal rows of a batch are numbered, and the id
    contains the batch."""

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
        return self.to_events(reader.load(self.config.path) if self.config.path else reader.load())

    def to_events(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        c = self.config
        kafka = c.format == "kafka"
        whole = F.to_json(whole_row(rows.columns))  # identifies the row; its nulls are left out
        document = F.to_json(whole_row(rows.columns), {"ignoreNullFields": "false"})
        default = F.col("value").cast("string") if kafka else document
        text = F.expr(c.value).cast("string") if c.value else default
        refused = F.lit(None).cast("string")
        if c.event_id:
            own = F.nullif(F.expr(c.event_id).cast("string"), F.lit(""))
            refused = F.when(own.isNull(), F.lit("event_id is null or empty"))
            identity = F.coalesce(own, F.sha1(whole))
        else:
            identity = F.concat_ws(":", "topic", "partition", "offset") if kafka else F.sha1(whole)
        ts_ms = F.unix_millis("timestamp") if kafka else F.unix_millis(F.current_timestamp())
        if c.ts:
            value = F.expr(c.ts)
            ts_ms = value.try_cast("bigint")
            is_time = F.coalesce(ts_ms.between(0, LAST_MS), F.lit(False))
            refused = F.coalesce(refused, F.when(value.isNotNull() & ~is_time, F.lit("ts is not a time")))
        position = SourcePosition(
            id=F.concat_ws(":", F.lit(c.id or c.format), identity),
            ts_ms=ts_ms,
            name=F.lit(c.id or c.format),
            table=F.col("topic") if kafka and not c.table else F.lit(c.table or c.id or c.format),
            key=F.col("key").cast("string") if kafka else None,
            refused=refused,
        )
        return read_documents(rows, text, position, c.envelope if kafka or c.value else "row")

    def identity(self) -> dict[str, Any]:
        safe = {k: v for k, v in self.config.options.items() if not any(part in k.lower() for part in SECRET_WORDS)}
        return {"format": self.config.format, "options": safe, "path": self.config.path}
