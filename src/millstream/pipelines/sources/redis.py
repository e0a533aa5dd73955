"""Redis Streams as a source, through Spark's ``redis_streams`` format. An event's id is its stream and entry id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.envelope_reader import (
    MAX_DOCUMENT_BYTES,
    Format,
    SourcePosition,
    legible,
    read_documents,
    too_large,
)
from millstream.pipelines.redis_address import RedisAddress, RedisUri, database_at, no_second_password, without_secrets
from millstream.pipelines.sources.source import Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, written_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_IMPATIENT = {"deadlineMs": "1000", "connectTimeoutMs": "1000", "answerTimeoutMs": "1000"}
"""For a request that is repeated soon."""
_MEMORY_OR_REPLICATED = written_as(r"^(memory|replicated\([1-9][0-9]{0,8}\))$", "memory, or replicated(n)")


class RedisSourceConfig(SourceConfig):
    """Options of the source ``redis``."""

    uri: RedisUri = Field(repr=False)
    """The address of the Redis server, Sentinel or cluster."""
    password_file: NonEmpty | None = None
    """A file with the password for ``uri``. The driver and every executor read it."""
    stream: NonEmpty | None = None
    """The name of the only stream to read. Give exactly one of ``stream``, ``streams`` and ``pattern``."""
    streams: list[NonEmpty] = Field(default_factory=list)
    """The names of the streams to read."""
    pattern: NonEmpty | None = None
    """A regular expression that must match the whole name of a stream."""
    group: NonEmpty | Literal[False] | None = None
    """The consumer group that publishes progress, for lag and retention. It must have no consumers. By default
    ``pipeline:<tenant>:<name>``; ``false``: none."""
    start: NonEmpty | dict[str, str] = "earliest"
    """Where a new pipeline begins: ``earliest``, ``latest``, or an id per stream, after which it reads."""
    field: NonEmpty = "event"
    """The field of an entry that contains the document. An entry without it is a row of its fields."""
    format: Format = "auto"
    """The form of the documents. ``auto`` detects it for each document."""
    table: NonEmpty | None = None
    """The table of events whose document names none. By default the name of the stream."""
    event_id: Literal["position", "payload"] = "position"
    """What identifies an event: ``position`` is stream and entry id, ``payload`` is the id in the document."""
    fail_on_data_loss: bool = True
    """true: entries that were trimmed before they were read stop the pipeline. false: they are logged and counted."""
    durability: Annotated[str, _MEMORY_OR_REPLICATED] = "memory"
    """``replicated(n)`` reads only entries that n replicas have, so that a failover removes no entry that was read.
    ``memory`` reads every entry of the primary."""
    partitions: Annotated[int, Field(ge=1, le=1000)] | None = None
    """The number of tasks of a batch. More tasks than streams split streams, and lose their order. By default each
    stream is read by one task."""
    send_timeout: Annotated[Duration, Field(ge=100)] = 5_000
    """How long to wait for one reply. Then the connection counts as broken."""
    batch_timeout: Annotated[Duration, Field(ge=100)] = 60_000
    """How long a request is repeated on other connections; then ``retry`` of the spec decides."""
    connect_timeout: Annotated[Duration, Field(ge=100)] = 5_000
    """How long opening one connection may take."""

    @model_validator(mode="after")
    def _one_choice(self) -> RedisSourceConfig:
        no_second_password(self.uri, self.password_file)
        if sum((self.stream is not None, bool(self.streams), self.pattern is not None)) != 1:
            raise PydanticCustomError("streams", "give exactly one of stream, streams and pattern")
        for name in self.names:
            # Spark's format has one option for all names, separated by commas.
            if "," in name or name != name.strip():
                why = "{name}: a name with a comma, or with a space at an end, cannot be read; list each stream apart"
                raise PydanticCustomError("streams", why, {"name": repr(name)})
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise PydanticCustomError("streams", "{names}: listed twice", {"names": ", ".join(twice)})
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                why = "{pattern} is not a regular expression: {why}"
                context = {"pattern": repr(self.pattern), "why": str(error)}
                raise PydanticCustomError("pattern", why, context) from error
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

    def takes_ids_of_documents(self) -> bool:
        return self.config.event_id == "payload"

    def reads_stream(self, address: RedisAddress, stream: str) -> bool:
        c = self.config
        if database_at(address.uri) != database_at(c.uri):
            return False
        return stream in c.names or (c.pattern is not None and re.fullmatch(c.pattern, stream) is not None)

    def order(self) -> str | None:
        return "each stream's own" if self.config.partitions in (None, 1) else None

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        reader = session.readStream.format("redis_streams").options(**self._options(opening))
        return self.to_events(reader.load())

    def behind(self, opening: Opening, finished: Any) -> int | None:
        from millstream.spark.progress import backlog

        return backlog(self._options(opening) | _IMPATIENT, finished)

    def to_events(self, entries: DataFrame) -> DataFrame:
        """Entries, in the columns of the format, as events. Tests also call it with a batch."""
        from pyspark.sql import functions as F

        c = self.config
        fields = F.transform_values(F.col("fields"), lambda _, value: value.cast("string"))
        value = F.col("value").cast("string")
        text = F.coalesce(value, F.to_json(F.transform_values(fields, lambda _, field: legible(field))))
        illegible = F.exists(F.map_values(fields), lambda field: ~F.is_valid_utf8(field))
        size = F.try_element_at(fields, F.lit("millstream.oversize"))
        repeated = F.try_element_at(fields, F.lit("millstream.repeated"))
        position = SourcePosition(
            id=F.concat_ws(":", F.col("stream"), F.col("id")),
            ts_ms=F.split_part(F.col("id"), F.lit("-"), F.lit(1)).try_cast("bigint"),
            name=F.lit(c.id) if c.id else F.col("stream"),
            table=F.lit(c.table) if c.table else F.col("stream"),
            key=F.try_element_at(fields, F.lit("key")),
            refused=F.when(size.isNotNull(), too_large(size))
            .when(value.isNull() & illegible, F.lit("a field of the entry is not valid UTF-8"))
            .when(
                repeated.isNotNull(), F.lit("the entry has a field more than once, and only the last one can be kept")
            ),
        )
        return read_documents(entries, text, position, c.format, own_ids=c.event_id == "payload")

    def _options(self, opening: Opening) -> dict[str, str]:
        c = self.config
        # The prefix keeps the group apart from routers' groups, which often have the pipeline's name.
        group = f"pipeline:{opening.tenant}:{opening.pipeline}" if c.group is None else c.group
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
            "maxEntryBytes": str(MAX_DOCUMENT_BYTES),
            "failOnDataLoss": str(c.fail_on_data_loss).lower(),
            "durability": c.durability,
        }
        options |= {"subscribePattern": c.pattern} if c.pattern else {"subscribe": ",".join(c.names)}
        return options | ({"group": group} if group else {})

    def identity(self) -> dict[str, Any]:
        return {"uri": without_secrets(self.config.uri), "streams": self.config.names or self.config.pattern}
