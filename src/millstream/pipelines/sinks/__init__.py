"""Sinks, one file each: parts of the spec that write batches. To add one, list it here."""

from typing import TYPE_CHECKING

from millstream.pipelines.sinks.sink import Delivery, Sink, SinkConfig, Write
from millstream.pipelines.spec.part import classes, one_of

SINKS = classes(
    __name__,
    (
        "redis.RedisSink",
        "spark.FilesSink",
        "spark.ConsoleSink",
        "spark.SparkSink",
    ),
)

if TYPE_CHECKING:
    AnySink = Sink
else:
    AnySink = one_of(SINKS)

__all__ = ["SINKS", "AnySink", "Delivery", "Sink", "SinkConfig", "Write"]
