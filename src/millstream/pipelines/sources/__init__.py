"""Sources: each a file, each a part of the spec that opens as a frame of events. To add one, list it here."""

from typing import Annotated

from pydantic import Field

from millstream.pipelines.sources.files import FilesSource
from millstream.pipelines.sources.generator import GeneratorSource
from millstream.pipelines.sources.redis import RedisSource
from millstream.pipelines.sources.source import Opening, Source
from millstream.pipelines.sources.spark import SparkSource

AnySource = Annotated[RedisSource | FilesSource | GeneratorSource | SparkSource, Field(discriminator="type")]

__all__ = ["AnySource", "FilesSource", "GeneratorSource", "Opening", "RedisSource", "Source", "SparkSource"]
