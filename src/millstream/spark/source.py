"""``spark.read.format("redis_streams")`` and its three sisters: options in, a reader or a writer out."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType, TimestampType

from millstream.spark import FORMAT
from millstream.spark.options import SourceOptions, source_options
from millstream.spark.reader import RedisStreamsBatchReader, RedisStreamsReader

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
        options = source_options(self.options, streaming=False)
        return RedisStreamsBatchReader(options, **_columns(options, schema))

    def streamReader(self, schema: StructType) -> RedisStreamsReader:
        options = source_options(self.options, streaming=True)
        return RedisStreamsReader(options, **_columns(options, schema))


def _columns(options: SourceOptions, schema: StructType) -> dict[str, Any]:
    default = [(field.name, field.dataType) for field in schema] == [(f.name, f.dataType) for f in DEFAULT_SCHEMA]
    return {"schema": to_arrow_schema(schema, timezone="UTC"), "default_columns": default}
