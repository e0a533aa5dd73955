"""The spec as a whole: ``apiVersion: millstream/v1``, ``kind: Pipeline``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.model import Backoff
from millstream.pipelines.processors import AnyProcessor
from millstream.pipelines.redis_address import RedisUri, no_second_password
from millstream.pipelines.sinks import AnySink
from millstream.pipelines.sources import AnySource
from millstream.pipelines.spec.part import BareDuration, Duration, Name, NonEmpty, Part, Size, Text


class Metadata(Part):
    name: Name
    tenant: Name = "default"
    labels: dict[str, Text] = Field(default_factory=dict)
    annotations: dict[str, Text] = Field(default_factory=dict)


class BatchSettings(Part):
    """``max_events`` and ``max_bytes`` bound a batch as far as the source can; ``max_ms`` is how often one begins."""

    max_events: Annotated[int, Field(ge=1)] = 100_000
    max_bytes: Annotated[Size, Field(ge=1)] | None = None
    max_ms: BareDuration = 0


class RetrySettings(Part):
    """How the source, and a sink that gates the checkpoint, are tried again: until they answer, or until ``deadline``;
    with ``deadline: none`` for ever."""

    initial: Annotated[Duration, Field(ge=1)] = 100
    max: Annotated[Duration, Field(ge=1)] = 10_000
    multiplier: Annotated[float, Field(ge=1)] = 2.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.2
    deadline: Duration | Literal["none"] = 600_000

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.initial, self.multiplier, self.max, self.jitter)

    def over(self, elapsed_ms: float) -> bool:
        """Whether it is too late to try again after so long."""
        return self.deadline != "none" and elapsed_ms > self.deadline


class DeadLetterSettings(Part):
    """Where events go that cannot be processed. By default a stream named after the pipeline, at the first Redis that
    the spec names. ``overflow`` at ``max_entries``: ``drop_oldest``; ``reject`` the new one, logged and counted; or
    ``block`` until there is room. With ``enabled: false``, such an event stops the pipeline."""

    enabled: bool = True
    uri: RedisUri | None = Field(default=None, repr=False)
    password_file: NonEmpty | None = None
    stream: NonEmpty | None = None
    max_entries: Annotated[int, Field(ge=1)] = 10_000
    max_age: Annotated[Duration, Field(ge=1)] = 7 * 86_400_000
    overflow: Literal["drop_oldest", "reject", "block"] = "drop_oldest"

    @model_validator(mode="after")
    def _one_password(self) -> DeadLetterSettings:
        no_second_password(self.uri, self.password_file)
        if self.password_file is not None and self.uri is None:
            raise PydanticCustomError("uri", "password_file needs the uri that it belongs to")
        return self


def _directory(path: str) -> str:
    """A place with a scheme would silently become a directory of that name on this machine."""
    scheme, found, rest = path.partition("://")
    if not found:
        return path
    if scheme.lower() == "file" and rest.startswith("/"):
        return rest
    why = (
        f"{scheme}:// cannot hold a checkpoint: spools and the spec's fingerprint are files. Give a directory, on a "
        "cluster one that all hosts have mounted at the same path"
    )
    raise PydanticCustomError("checkpoint", "{why}", {"why": why})


class CheckpointSettings(Part):
    """A local directory, or one that driver and executors share. By default ``checkpoints/<name>``."""

    path: Annotated[NonEmpty, AfterValidator(_directory)] | None = None


class SparkSettings(Part):
    master: NonEmpty | None = None
    conf: dict[str, Text] = Field(default_factory=dict)


class PipelineSpec(Part):
    source: AnySource
    processors: list[AnyProcessor] = Field(default_factory=list)
    sinks: Annotated[list[AnySink], Field(min_length=1)]
    batch: BatchSettings = BatchSettings()
    retry: RetrySettings = RetrySettings()
    commit_policy: Literal["required", "all"] = "required"
    dlq: DeadLetterSettings = DeadLetterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    spark: SparkSettings = SparkSettings()


class Pipeline(Part):
    api_version: Literal["millstream/v1"] = Field(alias="apiVersion")
    kind: Literal["Pipeline"]
    metadata: Metadata
    spec: PipelineSpec

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def tenant(self) -> str:
        return self.metadata.tenant

    @property
    def checkpoint_path(self) -> str:
        return self.spec.checkpoint.path or f"checkpoints/{self.name}"
