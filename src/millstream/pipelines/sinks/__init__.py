"""Sinks: each a file, each a part of the spec that takes batches. To add one, list it here."""

from typing import Annotated

from pydantic import Field

from millstream.pipelines.sinks.console import ConsoleSink
from millstream.pipelines.sinks.files import FilesSink
from millstream.pipelines.sinks.redis import RedisSink
from millstream.pipelines.sinks.sink import Delivery, Sink, Write
from millstream.pipelines.sinks.spark import SparkSink

AnySink = Annotated[RedisSink | FilesSink | ConsoleSink | SparkSink, Field(discriminator="type")]

__all__ = ["AnySink", "ConsoleSink", "Delivery", "FilesSink", "RedisSink", "Sink", "SparkSink", "Write"]
