"""Redis Streams as a source, through Spark's ``redis_streams`` format. An event's id is its stream and entry id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelope_reader import Format, SourcePosition, read_documents
from millstream.pipelines.redis_address import RedisAddress, RedisUri, no_second_password, without_secrets
from millstream.pipelines.sources.source import Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, written_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_IMPATIENT = {"deadlineMs": "1000", "connectTimeoutMs": "1000", "answerTimeoutMs": "1000"}
"""For a question that is asked again soon."""
_MEMORY_OR_REPLICATED = written_as(r"^(memory|replicated\([1-9][0-9]{0,8}\))$", "memory, or replicated(n)")


class RedisSourceConfig(SourceConfig):
    """``field`` holds the document; an entry without it is a row of its own fields. ``group`` is the pipeline's name
    unless told otherwise, so that lag and retention see the pipeline; ``false`` publishes no progress. Streams are not
    cut, so that their order is kept, unless ``partitions`` asks for more tasks than there are streams.
    ``durability: replicated(n)`` reads only what n replicas have, so that a failover takes nothing back.
    ``connect_timeout`` and ``send_timeout`` are for one connection and one answer, ``batch_timeout`` for how long a
    question is repeated on other connections; then ``retry`` of the spec decides."""

    uri: RedisUri = Field(repr=False)
    password_file: NonEmpty | None = None
    stream: NonEmpty | None = None
    streams: list[NonEmpty] = Field(default_factory=list)
    pattern: NonEmpty | None = None
    group: NonEmpty | Literal[False] | None = None
    start: NonEmpty | dict[str, str] = "earliest"
    field: NonEmpty = "event"
    format: Format = "auto"
    table: NonEmpty | None = None
    event_id: Literal["position", "payload"] = "position"
    fail_on_data_loss: bool = True
    durability: Annotated[str, _MEMORY_OR_REPLICATED] = "memory"
    partitions: Annotated[int, Field(ge=1, le=1000)] | None = None
    send_timeout: Annotated[Duration, Field(ge=100)] = 5_000
    batch_timeout: Annotated[Duration, Field(ge=100)] = 60_000
    connect_timeout: Annotated[Duration, Field(ge=100)] = 5_000

    @model_validator(mode="after")
    def _one_choice(self) -> RedisSourceConfig:
        no_second_password(self.uri, self.password_file)
        if sum((self.stream is not None, bool(self.streams), self.pattern is not None)) != 1:
            raise PydanticCustomError("streams", "give exactly one of stream, streams and pattern")
        return self

    @property
    def names(self) -> list[str]:
        return [self.stream] if self.stream is not None else self.streams

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(self.uri, self.password_file)


class RedisSource(Source):
    type: Literal["redis"]
    config: RedisSourceConfig

    def addresses(self) -> Iterator[RedisAddress]:
        yield self.config.address

    def order(self) -> str | None:
        return "each stream's own" if self.config.partitions in (None, 1) else None

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        reader = session.readStream.format("redis_streams").options(**self._options(opening))
        return self.understood(reader.load())

    def behind(self, opening: Opening, finished: Any) -> int | None:
        from millstream.spark import backlog

        return backlog(self._options(opening) | _IMPATIENT, finished)

    def understood(self, entries: DataFrame) -> DataFrame:
        """Entries, in the columns of the format, as events. Also what a test gives as a batch."""
        from pyspark.sql import functions as F

        c = self.config
        fields = F.transform_values(F.col("fields"), lambda _, value: value.cast("string"))
        value = F.col("value").cast("string")
        # Bytes that are no UTF-8 are no JSON either; as base64 they survive the way into the dead letters.
        legible = F.when(F.is_valid_utf8(value), value)
        shown = legible.otherwise(F.concat(F.lit("base64:"), F.base64(F.col("value").cast("binary"))))
        text = F.when(F.col("value").isNotNull(), shown).otherwise(F.to_json(fields))
        position = SourcePosition(
            id=F.concat_ws(":", F.col("stream"), F.col("id")),
            ts_ms=F.split_part(F.col("id"), F.lit("-"), F.lit(1)).try_cast("bigint"),
            name=F.lit(c.id) if c.id else F.col("stream"),
            table=F.lit(c.table) if c.table else F.col("stream"),
            key=F.try_element_at(fields, F.lit("key")),
        )
        return read_documents(entries, text, position, c.format, own_ids=c.event_id == "payload")

    def _options(self, opening: Opening) -> dict[str, str]:
        c = self.config
        group = opening.pipeline if c.group is None else c.group
        options = {
            **opening.secrets.options(c.address),
            "deadlineMs": str(c.batch_timeout),
            "connectTimeoutMs": str(c.connect_timeout),
            "answerTimeoutMs": str(c.send_timeout),
            "startingOffsets": c.start if isinstance(c.start, str) else json.dumps(c.start),
            "maxOffsetsPerTrigger": str(opening.max_events),
            "minPartitions": str(c.partitions or opening.partitions),
            "splitStreams": "true" if self.order() is None else "false",
            "valueField": c.field,
            "failOnDataLoss": str(c.fail_on_data_loss).lower(),
            "durability": c.durability,
        }
        options |= {"subscribePattern": c.pattern} if c.pattern else {"subscribe": ",".join(c.names)}
        return options | ({"group": group} if group else {})

    def identity(self) -> dict[str, Any]:
        return {"uri": without_secrets(self.config.uri), "streams": self.config.names or self.config.pattern}
