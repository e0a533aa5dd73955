"""Any Spark streaming format with its options: Kafka, Delta, rate, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.sources.source import Ids, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import SECRET_WORDS, NonEmpty, Text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
