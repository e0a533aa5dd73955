"""Redis Streams as a sink: fields ``event``, ``id``, ``key`` and ``headers``, exactly once, through Spark's format.

Existing consumers of this field read these names: ``json.loads(entry["event"])["id"]`` works.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from millstream.errors import InvalidArgument, WrongKeyType
from millstream.model import Durability
from millstream.pipelines.envelopes import AnyEnvelope, Native, members, plain, quoted, quoting
from millstream.pipelines.events import MAX_ENTRY_BYTES, fail_where
from millstream.pipelines.redis_address import RedisAddress, RedisUri, no_second_password
from millstream.pipelines.sinks.sink import TIME, Sink, SinkConfig, Write
from millstream.pipelines.sinks.small_batches import SmallBatches
from millstream.pipelines.spec.part import Duration, NonEmpty, TemplateText, written_as
from millstream.pipelines.templates import Template
from millstream.spark.sink_options import Delivered, read_report

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.broker import BlockingBroker
    from millstream.pipelines.sink_queue import StoredBatch
    from millstream.pipelines.spec.pipeline import PipelineSpec

_CHUNK = 5_000
"""The number of rows of a queued batch that are read at once."""


def _durability(text: str) -> str:
    try:
        Durability.parse(text)
    except InvalidArgument as error:
        raise PydanticCustomError("durability", "write {allowed}", {"allowed": error.allowed}) from error
    return text


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


HASH_TAG = r"^[^{]*\{[^}]+\}"
"""Matches a name with a hash tag, which can have companion keys although it contains a closing brace."""
_NO_KEY = "default"
"""What Debezium Server writes for an event without a key, such as a truncate."""


class RedisSinkConfig(SinkConfig):
    """Options of the sink ``redis``."""

    uri: RedisUri = Field(repr=False)
    """The address of the Redis server, Sentinel or cluster."""
    password_file: NonEmpty | None = None
    """A file with the password for ``uri``. The driver and every executor read it."""
    stream: TemplateText | None = None
    """A template for the stream's name. An event without one of its fields becomes a dead letter. Without it a
    ``route`` processor must name the streams."""
    envelope: AnyEnvelope = Native()
    """The form of the documents."""
    key: TemplateText | None = None
    """A template for the field ``key`` of an entry. A missing field is left empty. By default the key of the event."""
    headers: dict[NonEmpty, TemplateText] = Field(default_factory=dict)
    """Templates for the field ``headers`` of an entry, by name. A missing field is left empty."""
    fields: Literal["native", "debezium"] = "native"
    """The names of an entry's fields: ``native`` writes event, id, key and headers; ``debezium`` writes key, value and
    id, as Debezium Server does."""
    maxlen: (
        Annotated[str, BeforeValidator(_as_text), written_as(r"^~?[0-9]{1,18}$", "a number, or ~ and a number")] | None
    ) = None
    """The maximum number of entries in a stream of this sink: each write removes the oldest ones beyond it, also
    entries that a group has not read. A number is exact; ~ before it trims whole nodes only, which is cheaper and keeps
    a few more. Without it the sink trims nothing."""
    durability: Annotated[str, AfterValidator(_durability)] | None = None
    """When a write is complete: ``memory``, ``appended``, ``fsynced`` or ``replicated(n)``. By default ``memory``."""
    event_id_window: Duration = 86_400_000
    """How long ids of events are stored, where a replay is recognized by them."""
    send_timeout: Annotated[Duration, Field(ge=100)] = 5_000
    """How long to wait for one reply. Then the connection counts as broken."""
    batch_timeout: Annotated[Duration, Field(ge=100)] = 30_000
    """How long one attempt to write a batch may take; then ``retry`` of the spec decides."""
    connect_timeout: Annotated[Duration, Field(ge=100)] = 10_000
    """How long opening one connection may take."""

    @model_validator(mode="after")
    def _one_password(self) -> RedisSinkConfig:
        no_second_password(self.uri, self.password_file)
        return self

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(self.uri, self.password_file)


class RedisSink(Sink):
    type: Literal["redis"]
    config: RedisSinkConfig
    counts = True
    _refused_streams: set[str] = PrivateAttr(default_factory=set)
    _checks_size: bool = PrivateAttr(default=False)
    _small_batches: SmallBatches = PrivateAttr(default_factory=SmallBatches)

    def addresses(self) -> Iterator[RedisAddress]:
        yield self.config.address

    def templates(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for name, text in (("stream", self.config.stream), ("key", self.config.key)):
            if text is not None:
                yield ("config", name), text
        for name, text in self.config.headers.items():
            yield ("config", "headers", name), text

    def misfits(self, spec: PipelineSpec) -> Iterator[tuple[tuple[str | int, ...], str]]:
        yield from super().misfits(spec)
        if self.config.stream is None and not any(processor.names_streams for processor in spec.processors):
            yield (
                ("config", "stream"),
                "this is missing and must be given, unless a route processor names the streams",
            )

    def prepare(self, events: DataFrame, tenant: str, keep: Sequence[Column] = ()) -> DataFrame:
        from pyspark.sql import functions as F

        stream = self._stream(tenant)
        rows = self.matching(events, tenant)
        document, key = self.config.envelope.column(rows), self._key(tenant)
        if self.config.fields == "debezium":
            columns = [F.coalesce(key, F.lit(_NO_KEY)).alias("key"), document.alias("value"), rows["id"]]
        else:
            headers = self._headers(rows, tenant).alias("headers")
            columns = [document.alias("event"), rows["id"], key.alias("key"), headers]
        constant = self._constant()
        if self._checks_size:
            rows = rows.where(~self._is_too_large(tenant))
        if constant is not None:
            return rows.select(*columns, *keep)
        routed = rows.select(*columns, stream.alias("stream"), *keep)
        return routed.where(routed["stream"].isNotNull())

    def misses(self, tenant: str) -> Column | None:
        from pyspark.sql import functions as F

        missing = None if self._constant() is not None else self._stream(tenant).isNull()
        if self._checks_size:
            too_large = self._is_too_large(tenant)
            missing = too_large if missing is None else F.coalesce(missing, F.lit(False)) | too_large
        if missing is None:
            return None
        return missing if self.filter is None else missing & self.filter.column(tenant)

    def unroutable(self, events: DataFrame, tenant: str) -> DataFrame | None:
        from pyspark.sql import functions as F

        missing = self.misses(tenant)
        if missing is None:
            return None
        named = f"the template {self.config.stream!r} names" if self.config.stream else "no route names"
        text = (
            f"no stream: {named} none for this event that can be a stream's name (not empty, no closing brace "
            "outside a hash tag, no key of another type)"
        )
        reason = F.lit(text)
        if self._checks_size:
            large = F.lit(f"its entry would have more than {MAX_ENTRY_BYTES} bytes")
            reason = F.when(self._is_too_large(tenant), large).otherwise(reason)
        return fail_where(events.where(missing), missing, stage=f"sink:{self.config.id}", reason=reason)

    def learn_from(self, error: BaseException, events: DataFrame, tenant: str) -> bool:
        text = str(error)
        if "PayloadTooLarge" in text and not self._checks_size:
            self._checks_size = True
            return True
        if "WrongKeyType" not in text or self._constant() is not None:
            return False
        stream = self._stream(tenant).alias("stream")
        named = [row["stream"] for row in self.matching(events, tenant).select(stream).distinct().toLocalIterator()]
        with self.config.address.open() as broker:
            refused = {name for name in named if name is not None and not _can_be_stream(broker, name)}
        self._refused_streams |= refused
        return bool(refused)

    def _is_too_large(self, tenant: str) -> Column:
        """Used only after an entry was refused, because it renders the templates once more."""
        from pyspark.sql import functions as F

        c = self.config
        texts = [F.col("before"), F.col("after"), F.col("id"), self._key(tenant)]
        texts += [Template.parse(text).column(strict=False, tenant=tenant) for text in c.headers.values()]
        size = F.lit(0)
        for text in texts:
            size = size + F.coalesce(F.octet_length(text), F.lit(0))
        return size > MAX_ENTRY_BYTES

    def write(self, rows: DataFrame, write: Write) -> Delivered:
        return self.write_beside(rows, write, ())

    def shape(self) -> str | None:
        """Settings of the stream count only as given or not: a sink without one would inherit that of the first."""
        is_set = {name: getattr(self.config, name) is not None for name in ("maxlen", "durability")}
        layout = {"envelope", "key", "headers", "fields"}
        made = self.model_dump(include={"filter": True, "config": layout}, mode="json")
        return json.dumps([made, is_set, None if self._constant() is not None else self.config.stream], sort_keys=True)

    def write_beside(self, rows: DataFrame, write: Write, further: Sequence[tuple[Sink, Write]]) -> Delivered:
        if write.delivery == "exactly_once_by_event_id":
            # The id column becomes no field of the entry, but the entry needs a field with the id.
            rows = rows.withColumn("_event_id", write.event_marker(rows["id"]))
        options = self._place(write) | self._common(write)
        for number, (sink, its_write) in enumerate(further):
            assert isinstance(sink, RedisSink), "only sinks of one shape are written together"
            options |= {f"also.{number}.{name}": value for name, value in sink._place(its_write).items()}
        if TIME in rows.columns:
            options["timeColumn"] = TIME
        with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
            report = f"{scratch}/report.json"
            options["report"] = report
            if not (write.unobserved and self._small_batches.write(rows, options)):
                rows.write.format("redis_streams").mode("append").options(**options).save()
            delivered = read_report(report)
        self._small_batches.written(delivered)
        return delivered

    def probe(self) -> None:
        with self.config.address.open(deadline_ms=self.config.connect_timeout) as broker:
            broker.ping()

    def deliver(self, session: SparkSession, batch: StoredBatch, write: Write) -> Delivered:
        """Writes from the driver, without Spark, so that a slow or unreachable sink does not occupy executors.

        The files do not change between attempts, so position and digest identify rows independent of the plan.
        """
        import pyarrow.dataset as ds

        from millstream.spark.fan_out import write_here

        options = self._place(write) | self._common(replace(write, delivery="exactly_once"))
        with batch.local_files() as files:
            rows = ds.dataset(files, format="parquet")
            return write_here(
                options, rows.schema, rows.to_batches(batch_size=_CHUNK, use_threads=False), partition="spool"
            )

    def _constant(self) -> str | None:
        """The stream, if all events go to the same one."""
        return Template.parse(self.config.stream).constant if self.config.stream else None

    def _stream(self, tenant: str) -> Column:
        from pyspark.sql import functions as F

        if self.config.stream is None:
            return _usable(F.col("stream"), self._refused_streams)
        own = Template.parse(self.config.stream).column(strict=True, tenant=tenant)
        if self._constant() is not None:
            return own
        return _usable(F.coalesce(own, F.col("stream")), self._refused_streams)

    def _key(self, tenant: str) -> Column:
        from pyspark.sql import functions as F

        if self.config.key is None:
            return F.col("key")
        return Template.parse(self.config.key).column(strict=False, tenant=tenant)

    def _headers(self, events: DataFrame, tenant: str) -> Column:
        from pyspark.sql import functions as F

        own = [
            (name, Template.parse(text).column(strict=False, tenant=tenant), quoted)
            for name, text in self.config.headers.items()
        ]
        content = ("content-type", F.lit(self.config.envelope.content_type), plain)
        how = quoting(events)
        return members(content, *((name, F.col(name), how(name)) for name in ("table", "op")), *own)

    def _common(self, write: Write) -> dict[str, str]:
        """The options that sinks have in common if they are written together."""
        options = {
            "content": "columns",
            "valueField": "value" if self.config.fields == "debezium" else "event",
            "delivery": write.delivery,
            "txnAppId": write.application,
            "txnVersion": str(write.version),
        }
        if write.delivery == "exactly_once_by_event_id":
            options["eventIdColumn"] = "_event_id"
        return options

    def _place(self, write: Write) -> dict[str, str]:
        """The options of one sink: its address, stream and limits."""
        c = self.config
        options = {
            **write.secrets.options(c.address),
            "sinkId": write.sink,
            "fence": write.fence(c.address),
            "deadlineMs": str(c.batch_timeout),
            "connectTimeoutMs": str(c.connect_timeout),
            "answerTimeoutMs": str(c.send_timeout),
            "eventIdWindow": f"{c.event_id_window}ms",
        }
        constant = self._constant()
        if constant is not None:
            options["stream"] = constant
        if c.maxlen is not None:
            options["maxlen"] = str(c.maxlen)
        if c.durability is not None:
            options["durability"] = c.durability
        return options


def _usable(stream: Column, refused: Collection[str]) -> Column:
    """Null for a name that no stream with companion keys can have, so that one event does not stop the batch."""
    from pyspark.sql import functions as F

    usable = (stream != "") & (~F.contains(stream, F.lit("}")) | stream.rlike(HASH_TAG))
    return F.when(usable & ~stream.isin(*refused) if refused else usable, stream)


def _can_be_stream(broker: BlockingBroker, name: str) -> bool:
    try:
        broker.xlen(name)
    except WrongKeyType:
        return False
    return True


__all__ = ["RedisSink", "RedisSinkConfig"]
