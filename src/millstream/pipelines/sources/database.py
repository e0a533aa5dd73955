"""What the sources that follow a database share: options, secrets, where segments lie, what must be so at a start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.pipelines.redis_address import has_secret
from millstream.pipelines.sources.source import Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, Size, written_as

if TYPE_CHECKING:
    from millstream.cdc import DatabaseAddress

_NUMERIC = r"^(text|double|decimal\(([0-9]|[12][0-9]|3[0-8])\))$"


def _column(text: str) -> str:
    if text.count(".") != 2:
        raise PydanticCustomError("column", "write schema.table.column")
    return text


class DatabaseConfig(SourceConfig):
    """``lanes: 1`` keeps the order of commits, more keep the order of each key. ``segments`` is where the log is read
    ahead to, by default under the checkpoint."""

    dsn: str = Field(repr=False)
    password_file: NonEmpty | None = None
    tables: Annotated[list[NonEmpty], Field(min_length=1)]
    snapshot: Literal["never", "initial", "always"] = "initial"
    lanes: Annotated[int, Field(ge=1, le=64)] = 1
    numeric: Annotated[str, written_as(_NUMERIC, "text, double, or decimal(n) with n from 0 to 38")] = "text"
    exclude: list[Annotated[str, AfterValidator(_column)]] = Field(default_factory=list)
    max_bytes: Annotated[Size, Field(ge=1 << 20)] = 1 << 30
    chunk_rows: Annotated[int, Field(ge=1)] = 100_000
    segments: NonEmpty | None = None
    connect_timeout: Annotated[Duration, Field(ge=1000)] = 10_000

    @model_validator(mode="after")
    def _no_comma(self) -> DatabaseConfig:
        for name in (*self.tables, *self.exclude):
            if "," in name:
                raise PydanticCustomError("tables", "a name with a comma cannot be given; a glob can: ? stands for it")
        return self


class DatabaseSource(Source):
    config: DatabaseConfig
    bounds = frozenset({"max_events", "max_bytes"})

    def secrets(self) -> Iterator[str]:
        if self._has_password():
            yield self.config.dsn

    def problems_before_start(self, pipeline: str, *, begun: bool, master: str) -> Iterator[str]:
        if not master.startswith("local") and self.config.segments is None:
            yield (
                f"the executors of {master} are other hosts, and must see the segments that the driver writes. "
                "Give config.segments: a directory on storage that all of them share"
            )
        if not master.startswith("local") and self._has_password():
            yield (
                f"the executors of {master} are other hosts, and the password in the dsn may stand on no command line. "
                "Write it into a file of mode 0600 at the same path on every host, and give password_file: /the/path"
            )
        why = self.refused(pipeline, begun=begun)
        if why is not None:
            yield why

    def refused(self, pipeline: str, *, begun: bool) -> str | None:
        """Why the database cannot be followed as it is."""
        raise AssertionError("every database has its own")

    def order(self) -> str | None:
        return "that of commits" if self.config.lanes == 1 else "that of each key's changes (lanes)"

    def can_fail(self) -> bool:
        return False

    def address(self) -> DatabaseAddress:
        from millstream.cdc import DatabaseAddress

        c = self.config
        return DatabaseAddress(c.dsn, c.password_file, connect_s=max(1, c.connect_timeout // 1000))

    def source_name(self, pipeline: str) -> str:
        return self.config.id or pipeline

    def shared_options(self, opening: Opening) -> dict[str, str]:
        """Options of the Spark format that every change source has. A dsn with a password goes by a file."""
        c, secret = self.config, self._has_password()
        options = {
            "dsnFile" if secret else "dsn": opening.secrets.file(c.dsn) if secret else c.dsn,
            "tables": ",".join(c.tables),
            "snapshot": c.snapshot,
            "segments": c.segments or f"{opening.checkpoint}/segments",
            "sourceName": self.source_name(opening.pipeline),
            "lanes": str(c.lanes),
            "numeric": c.numeric,
            "exclude": ",".join(c.exclude),
            "maxBytes": str(c.max_bytes),
            "maxChangesPerTrigger": str(opening.max_events),
            "chunkRows": str(min(c.chunk_rows, opening.max_events)),
        }
        given: dict[str, Any] = {"passwordFile": c.password_file, "maxBytesPerTrigger": opening.max_bytes}
        return options | {name: str(value) for name, value in given.items() if value is not None}

    def _has_password(self) -> bool:
        return has_secret(self.config.dsn) or re.search(r"\bpassword\s*=", self.config.dsn) is not None
