"""``spark.read.format("redis_streams")`` and its three sisters: options in, a reader or a writer out.

Spark imports this module in several short-lived processes of every application, whatever its format. So readers and
writers, and with them Arrow and the broker, are imported when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType, TimestampType

from millstream.spark import FORMAT
from millstream.spark.errors import InvalidOption
from millstream.spark.options import SourceOptions, source_options
from millstream.spark.sink_options import sink_targets

if TYPE_CHECKING:
    from millstream.spark.reader import RedisStreamsBatchReader, RedisStreamsReader
    from millstream.spark.writer import RedisStreamsBatchWriter, RedisStreamsWriter

DEFAULT_SCHEMA = StructType(
    [
        StructField("stream", StringType()),
        StructField("id", StringType()),
        StructField("timestamp", TimestampType()),
        StructField("value", BinaryType()),
        StructField("fields", MapType(StringType(), BinaryType())),
    ]
)


class RedisStreamsSource(DataSource):
    """Made on the driver, anew for every plan; travels to the tasks as a pickle. ``options.py`` lists the options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """The default columns. With a schema of the user's own, Spark does not ask."""
        return DEFAULT_SCHEMA

    def reader(self, schema: StructType) -> RedisStreamsBatchReader:
        from millstream.spark.reader import RedisStreamsBatchReader

        options = source_options(self.options, streaming=False)
        return RedisStreamsBatchReader(options, **_columns(options, schema))

    def streamReader(self, schema: StructType) -> RedisStreamsReader:
        from millstream.spark.reader import RedisStreamsReader

        options = source_options(self.options, streaming=True)
        return RedisStreamsReader(options, **_columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> RedisStreamsBatchWriter:
        """Once for each write, on the driver. The id that is made here lasts for all tasks of it."""
        from millstream.spark.connection import reached_broker
        from millstream.spark.writer import RedisStreamsBatchWriter

        _no_overwrite(overwrite)
        targets = sink_targets(self.options, streaming=False)
        made = RedisStreamsBatchWriter(targets, to_arrow_schema(schema, timezone="UTC"), f"batch-{uuid4().hex}")
        for target in targets:
            reached_broker(target.address)
        return made

    def streamWriter(self, schema: StructType, overwrite: bool) -> RedisStreamsWriter:
        """Twice for each micro-batch, on the driver, in processes that live on: each of them connects once."""
        from millstream.spark.connection import reached_broker
        from millstream.spark.writer import RedisStreamsWriter

        _no_overwrite(overwrite)
        targets = sink_targets(self.options, streaming=True)
        made = RedisStreamsWriter(targets, to_arrow_schema(schema, timezone="UTC"))
        for target in targets:
            reached_broker(target.address)
        return made


def _no_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidOption("mode", "overwrite", "append; a stream is added to, never overwritten")


def _columns(options: SourceOptions, schema: StructType) -> dict[str, Any]:
    default = [(field.name, field.dataType) for field in schema] == [(f.name, f.dataType) for f in DEFAULT_SCHEMA]
    return {"schema": to_arrow_schema(schema, timezone="UTC"), "default_columns": default}
