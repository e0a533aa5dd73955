"""The data source ``redis_streams``: creates readers and writers, for batch and streaming, from options.

Spark imports this module in several short-lived processes of every application, even if it uses another format.
Therefore readers and writers, which import Arrow and the broker, are imported only when one is created.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from millstream.spark import FORMAT
from millstream.spark.errors import InvalidOption
from millstream.spark.options import SourceOptions, source_options
from millstream.spark.sink_options import sink_targets

if TYPE_CHECKING:
    from millstream.spark.filters import ColumnKind
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
    """Created on the driver for every plan and pickled to the tasks. ``options.py`` lists the options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """The default columns. Spark does not call this if the user gives a schema."""
        return DEFAULT_SCHEMA

    def reader(self, schema: StructType) -> RedisStreamsBatchReader:
        from millstream.spark.reader import FilteringBatchReader, RedisStreamsBatchReader

        options = source_options(self.options, streaming=False)
        if not options.push_filters or not _is_pushing_filters():
            return RedisStreamsBatchReader(options, **_columns(schema))
        return FilteringBatchReader(options, **_columns(schema), filter_columns=_filter_columns(options, schema))

    def streamReader(self, schema: StructType) -> RedisStreamsReader:
        from millstream.spark.reader import RedisStreamsReader

        options = source_options(self.options, streaming=True)
        return RedisStreamsReader(options, **_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> RedisStreamsBatchWriter:
        """Called once for each write, on the driver. All tasks of the write share the id that is created here."""
        from millstream.spark.connection import connected_broker
        from millstream.spark.writer import RedisStreamsBatchWriter

        _no_overwrite(overwrite)
        targets = sink_targets(self.options, streaming=False)
        writer = RedisStreamsBatchWriter(targets, to_arrow_schema(schema, timezone="UTC"), f"batch-{uuid4().hex}")
        for target in targets:
            connected_broker(target.address)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> RedisStreamsWriter:
        """Called twice for each micro-batch, in long-lived processes of the driver. Each process connects once."""
        from millstream.spark.connection import connected_broker
        from millstream.spark.writer import RedisStreamsWriter

        _no_overwrite(overwrite)
        targets = sink_targets(self.options, streaming=True)
        writer = RedisStreamsWriter(targets, to_arrow_schema(schema, timezone="UTC"))
        for target in targets:
            connected_broker(target.address)
        return writer


def _no_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidOption("mode", "overwrite", "append; streams are never overwritten")


def _columns(schema: StructType) -> dict[str, Any]:
    default = [(field.name, field.dataType) for field in schema] == [(f.name, f.dataType) for f in DEFAULT_SCHEMA]
    return {"schema": to_arrow_schema(schema, timezone="UTC"), "default_columns": default}


PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


def _is_pushing_filters() -> bool:
    """Whether Spark will call ``pushFilters`` of the reader.

    With ``spark.sql.python.filterPushdown.enabled=false``, the default, Spark rejects each reader that has this method.
    The setting is not available here, but Spark pushes filters in a process that runs a module of its own.
    """
    return PUSHDOWN_WORKER in sys.modules or getattr(sys.modules["__main__"].__spec__, "name", None) == PUSHDOWN_WORKER


def _filter_columns(options: SourceOptions, schema: StructType) -> dict[str, ColumnKind]:
    """The columns whose filters can be translated, by name."""
    from millstream.spark.rows import META_COLUMNS

    if options.mode == "FAILFAST":
        return {}  # an entry that does not fit the schema is an error even if a filter excludes it
    has_default_columns = _columns(schema)["default_columns"]
    kinds: dict[str, ColumnKind] = {}
    for field in schema:
        column = field.name if has_default_columns else META_COLUMNS.get(field.name)
        if field.name == options.corrupt_column:
            continue
        if column == "timestamp" and isinstance(field.dataType, (TimestampType, TimestampNTZType)):
            kinds[field.name] = "timestamp" if isinstance(field.dataType, TimestampType) else "timestamp_ntz"
        elif column in ("stream", "id") and field.dataType == StringType():
            kinds[field.name] = "stream" if column == "stream" else "id"
    return kinds
