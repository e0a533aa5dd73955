"""The spec as a whole: ``apiVersion: millstream/v1``, ``kind: Pipeline``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from millstream.model import Backoff
from millstream.pipelines.processors import AnyProcessor
from millstream.pipelines.redis_address import RedisUri, no_second_password
from millstream.pipelines.sinks import AnySink
from millstream.pipelines.sources import AnySource
from millstream.pipelines.spec.part import BareDuration, Duration, Name, NonEmpty, Part, Size, Text
from millstream.storage import InvalidLocation, has_scheme
from millstream.storage.location import check_location, is_file_uri, local_path


class Metadata(Part):
    name: Name
    """The name of the pipeline in metrics, logs, paths and ids. Pipelines that run together need different names."""
    tenant: Name = "default"
    """The owner of the pipeline. It is part of the names of the checkpoint, the consumer group and the dead letters."""
    labels: dict[str, Text] = Field(default_factory=dict)
    """Free texts by name, for people and tools."""
    annotations: dict[str, Text] = Field(default_factory=dict)
    """Free texts by name, for people and tools."""


class BatchSettings(Part):
    """The size and the interval of batches."""

    max_events: Annotated[int, Field(ge=1)] = 100_000
    """The maximum number of events in a batch, if the source supports it. Change sources take whole transactions."""
    max_bytes: Annotated[Size, Field(ge=1)] | None = None
    """The maximum number of bytes in a batch, if the source supports it. By default only the events are limited."""
    max_ms: BareDuration = 0
    """The time between the starts of two batches. 0: the next batch starts when the previous one has ended."""


class RetrySettings(Part):
    """How the source, and a sink that gates the checkpoint, are retried."""

    initial: Annotated[Duration, Field(ge=1)] = 100
    """The pause before the first retry."""
    max: Annotated[Duration, Field(ge=1)] = 10_000
    """The longest pause between two retries."""
    multiplier: Annotated[float, Field(ge=1)] = 2.0
    """Each pause is longer than the previous one by this factor, up to ``max``."""
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Each pause is longer or shorter by up to this fraction, at random, so that pipelines do not retry together."""
    deadline: Duration | Literal["none"] = 600_000
    """After this time of failed retries the pipeline stops. ``none``: it retries without a limit."""

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.initial, self.multiplier, self.max, self.jitter)

    def over(self, elapsed_ms: float) -> bool:
        """Whether the deadline has passed after this time."""
        return self.deadline != "none" and elapsed_ms > self.deadline


class DeadLetterSettings(Part):
    """The stream of events that cannot be processed."""

    enabled: bool = True
    """false: an event that cannot be processed stops the pipeline instead of becoming a dead letter."""
    uri: RedisUri | None = Field(default=None, repr=False)
    """The Redis with the dead-letter stream. By default the first Redis that the spec names."""
    password_file: NonEmpty | None = None
    """A file with the password for ``uri``. Every process that connects reads it."""
    stream: NonEmpty | None = None
    """The name of the dead-letter stream. By default ``<tenant>:<name>.dlq``."""
    max_entries: Annotated[int, Field(ge=1)] = 10_000
    """The maximum number of dead letters in the stream; ``overflow`` decides about further ones."""
    max_age: Annotated[Duration, Field(ge=1)] = 7 * 86_400_000
    """Dead letters older than this are removed."""
    overflow: Literal["drop_oldest", "reject", "block"] = "drop_oldest"
    """At ``max_entries``: ``drop_oldest`` removes the oldest; ``reject`` drops the new one, logged and counted;
    ``block`` waits until there is room."""

    @model_validator(mode="after")
    def _one_password(self) -> DeadLetterSettings:
        no_second_password(self.uri, self.password_file)
        if self.password_file is not None and self.uri is None:
            raise PydanticCustomError("uri", "password_file needs the uri that it belongs to")
        return self


def _location(path: str) -> str:
    try:
        check_location(path)
    except InvalidLocation as error:
        raise PydanticCustomError("checkpoint", "{why}", {"why": f"write {error.allowed}"}) from error
    return path


class CheckpointSettings(Part):
    """A local directory, a directory that all hosts have mounted at this path, or a URI of a store that Hadoop has a
    connector for: ``hdfs://``, ``s3a://``, ``abfss://``, ``gs://``. By default ``checkpoints/<tenant>/<name>`` in the
    directory of the pipeline's file, wherever the command is started. A spec without a file has it under
    ``$XDG_STATE_HOME/millstream`` (``~/.local/state/millstream``)."""

    path: Annotated[NonEmpty, AfterValidator(_location)] | None = None
    """The place of the checkpoint: a local or shared directory, or a URI of a store, such as
    ``s3a://bucket/directory``. By default ``checkpoints/<tenant>/<name>`` next to the pipeline's file."""


class SparkSettings(Part):
    master: NonEmpty | None = None
    """The master of the Spark cluster, such as ``spark://host:7077``. By default ``MILLSTREAM_SPARK_MASTER``,
    or ``local[*]``."""
    conf: dict[str, Text] = Field(default_factory=dict)
    """Spark properties by name, such as ``spark.executor.memory``."""


class PipelineSpec(Part):
    source: AnySource
    """Where events come from. ``type`` selects the kind of source."""
    processors: list[AnyProcessor] = Field(default_factory=list)
    """What changes the events, in this order. ``type`` selects the kind of each processor."""
    sinks: Annotated[list[AnySink], Field(min_length=1)]
    """Where the events are written. ``type`` selects the kind of each sink."""
    batch: BatchSettings = BatchSettings()
    """The size and the interval of batches."""
    retry: RetrySettings = RetrySettings()
    """How the source, and sinks that gate the checkpoint, are retried."""
    commit_policy: Literal["required", "all"] = "required"
    """Which sinks gate the checkpoint: those with ``required: true``, or all."""
    dlq: DeadLetterSettings = DeadLetterSettings()
    """The stream of events that cannot be processed."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Where the progress of the pipeline is stored."""
    spark: SparkSettings = SparkSettings()
    """The Spark cluster and its properties."""


class Pipeline(Part):
    """A pipeline as its YAML file describes it, validated."""

    api_version: Literal["millstream/v1"] = Field(alias="apiVersion")
    """The version of the file format."""
    kind: Literal["Pipeline"]
    """What the file describes."""
    metadata: Metadata
    """The pipeline's name and tenant."""
    spec: PipelineSpec
    """What the pipeline does."""
    _directory: Path | None = PrivateAttr(default=None)

    def in_directory(self, directory: Path) -> Self:
        """Sets the path of the pipeline's file, next to which its default checkpoint is."""
        self._directory = directory
        return self

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def tenant(self) -> str:
        return self.metadata.tenant

    @property
    def checkpoint_identity(self) -> str:
        """Equal for two pipelines that name the same directory, also through a symbolic link."""
        path = self.checkpoint_path
        return path if self.checkpoint_is_in_a_store else os.path.realpath(path)

    @property
    def checkpoint_is_in_a_store(self) -> bool:
        """Whether the checkpoint is reached through Spark's JVM."""
        return has_scheme(self.checkpoint_path)

    @property
    def checkpoint_path(self) -> str:
        """An absolute path, or a URI of a store. Only a relative ``checkpoint.path`` depends on the directory that the
        command is started in."""
        path = self.spec.checkpoint.path
        if path is not None and has_scheme(path):
            return path.rstrip("/")
        if path is not None and is_file_uri(path):
            return os.path.abspath(local_path(path))
        return os.path.abspath(path or _default_directory(self._directory) / "checkpoints" / self.tenant / self.name)


def _default_directory(of_the_file: Path | None) -> Path:
    if of_the_file is not None:
        return of_the_file
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "millstream"
