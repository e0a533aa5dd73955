"""Sources, one file each: parts of the spec that open as a frame of events. To add one, list it here."""

from typing import TYPE_CHECKING

from millstream.pipelines.sources.source import Opening, Source
from millstream.pipelines.spec.part import classes, one_of

SOURCES = classes(
    __name__,
    (
        "redis.RedisSource",
        "databases.PostgresSource",
        "databases.MariadbSource",
        "spark.FilesSource",
        "generator.GeneratorSource",
        "spark.SparkSource",
    ),
)

if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = one_of(SOURCES)

__all__ = ["SOURCES", "AnySource", "Opening", "Source"]
