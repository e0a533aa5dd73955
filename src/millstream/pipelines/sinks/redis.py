"""Redis Streams as a sink: fields ``event``, ``id``, ``key`` and ``headers``, exactly once, through Spark's format.

The names are those that consumers of this field already read: ``json.loads(entry["event"])["id"]`` works.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.errors import InvalidArgument
from millstream.model import Durability
from millstream.pipelines.envelopes import AnyEnvelope, Native, members, plain, quoted, quoting
from millstream.pipelines.events import fail_where
from millstream.pipelines.redis_address import RedisAddress, RedisUri, no_second_password
from millstream.pipelines.sinks.sink import TIME, Sink, SinkConfig, Write
from millstream.pipelines.spec.part import Duration, NonEmpty, TemplateText, written_as
from millstream.pipelines.templates import Template
from millstream.spark import Delivered, read_report

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.pipelines.spec.pipeline import PipelineSpec

_CHUNK = 5_000
"""Rows of a spooled batch that are read at once."""


def _durability(text: str) -> str:
    try:
        Durability.parse(text)
    except InvalidArgument as error:
        raise PydanticCustomError("durability", "write {allowed}", {"allowed": error.allowed}) from error
    return text


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_NO_KEY = "default"
"""What Debezium Server writes for an event without a key, such as a truncate."""


class RedisSinkConfig(SinkConfig):
    """``stream`` is a template, strict: an event without its fields is a dead letter. ``key`` and ``headers`` are
    templates too, lenient. Without ``stream``, a route processor must name one. ``maxlen`` is a hard cap; ``~`` before
    the number trims whole nodes only, which is cheaper. ``password_file`` is read where it is used: by the driver, and
    by every executor. ``fields: debezium`` names an entry's fields as Debezium Server's Redis sink does (``key`` and
    ``value``, with the id beside them), so that its consumers go on."""

    uri: RedisUri = Field(repr=False)
    password_file: NonEmpty | None = None
    stream: TemplateText | None = None
    envelope: AnyEnvelope = Native()
    key: TemplateText | None = None
    headers: dict[NonEmpty, TemplateText] = Field(default_factory=dict)
    fields: Literal["native", "debezium"] = "native"
    maxlen: (
        Annotated[str, BeforeValidator(_as_text), written_as(r"^~?[0-9]{1,18}$", "a number, or ~ and a number")] | None
    ) = None
    durability: Annotated[str, AfterValidator(_durability)] | None = None
    event_id_window: Duration = 86_400_000
    send_timeout: Annotated[Duration, Field(ge=100)] = 5_000
    batch_timeout: Annotated[Duration, Field(ge=100)] = 30_000
    connect_timeout: Annotated[Duration, Field(ge=100)] = 10_000

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
        if constant is not None:
            return rows.select(*columns, *keep)
        routed = rows.select(*columns, stream.alias("stream"), *keep)
        return routed.where(routed["stream"].isNotNull())

    def misses(self, tenant: str) -> Column | None:
        if self._constant() is not None:
            return None
        missing = self._stream(tenant).isNull()
        return missing if self.filter is None else missing & self.filter.column(tenant)

    def unroutable(self, events: DataFrame, tenant: str) -> DataFrame | None:
        missing = self.misses(tenant)
        if missing is None:
            return None
        named = f"the template {self.config.stream!r} names" if self.config.stream else "no route names"
        reason = f"no stream: {named} none for this event"
        return fail_where(events.where(missing), missing, stage=f"sink:{self.config.id}", reason=reason)

    def write(self, rows: DataFrame, write: Write) -> Delivered:
        return self.write_beside(rows, write, ())

    def shape(self) -> str | None:
        """Of the settings of a stream only whether they are given: those of the first hold for whom says nothing."""
        given = {name: getattr(self.config, name) is not None for name in ("maxlen", "durability")}
        told = {"envelope", "key", "headers", "fields"}
        made = self.model_dump(include={"filter": True, "config": told}, mode="json")
        return json.dumps([made, given, None if self._constant() is not None else self.config.stream], sort_keys=True)

    def write_beside(self, rows: DataFrame, write: Write, others: Sequence[tuple[Sink, Write]]) -> Delivered:
        if write.delivery == "exactly_once_by_event_id":
            # The column that decides is no field of the entry; the id is to be one as well.
            rows = rows.withColumn("_event_id", rows["id"])
        options = self._place(write) | self._common(write)
        for number, (other, its) in enumerate(others):
            assert isinstance(other, RedisSink), "only sinks of one shape are written together"
            options |= {f"also.{number}.{name}": value for name, value in other._place(its).items()}
        if TIME in rows.columns:
            options["timeColumn"] = TIME
        with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
            report = f"{scratch}/report.json"
            rows.write.format("redis_streams").mode("append").options(**options, report=report).save()
            return read_report(report)

    def probe(self) -> None:
        with self.config.address.open(deadline_ms=self.config.connect_timeout) as broker:
            broker.ping()

    def deliver(self, session: SparkSession, directory: Path, write: Write) -> Delivered:
        """From the driver, without Spark: a sink that is slow or gone must not hold executors that others need.

        The files do not change between tries, so position and digest identify rows whatever plan made them.
        """
        import pyarrow.dataset as ds

        from millstream.spark import write_here

        rows = ds.dataset(sorted(map(str, directory.glob("*.parquet"))), format="parquet")
        options = self._place(write) | self._common(replace(write, delivery="exactly_once"))
        return write_here(
            options, rows.schema, rows.to_batches(batch_size=_CHUNK, use_threads=False), partition="spool"
        )

    def _constant(self) -> str | None:
        """The stream, where all events go to one."""
        return Template.parse(self.config.stream).constant if self.config.stream else None

    def _stream(self, tenant: str) -> Column:
        from pyspark.sql import functions as F

        if self.config.stream is None:
            return F.col("stream")
        own = Template.parse(self.config.stream).column(strict=True, tenant=tenant)
        return own if self._constant() is not None else F.coalesce(own, F.col("stream"))

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
        """What sinks that are written together have in common."""
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
        """Where the rows go, and how."""
        c = self.config
        options = {
            **write.secrets.options(c.address),
            "sinkId": write.sink,
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


__all__ = ["RedisSink", "RedisSinkConfig"]
