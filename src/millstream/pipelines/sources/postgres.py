"""PostgreSQL as a source, through Spark's ``postgres_changes`` format: the rows that are there, then every change.

An event's id is the source's name, the transaction's place in the log, and the change's number in it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.cdc import POSTGRES_FORMAT
from millstream.pipelines.events import event_frame
from millstream.pipelines.sources.source import Leftover, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, Size
from millstream.pipelines.spec.uri import has_secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc import Login, SlotStatus, Wanted

log = logging.getLogger("millstream.pipelines")

_SLOT = r"^[a-z0-9_]{1,63}$"
_NUMERIC = r"^(text|double|decimal\(([0-9]|[12][0-9]|3[0-8])\))$"


def _dsn(text: str) -> str:
    """libpq's own two forms. Its parser says the rest when the pipeline starts."""
    if not text.startswith(("postgresql://", "postgres://")) and not re.search(
        r"(^|\s)(host|dbname|service)\s*=", text
    ):
        raise PydanticCustomError("dsn", "write postgresql://user@host:5432/database")
    return text


def _column(text: str) -> str:
    if text.count(".") != 2:
        raise PydanticCustomError("column", "write schema.table.column")
    return text


class PostgresConfig(SourceConfig):
    """``tables`` are names or globs, of the schema ``public`` where they name none. ``slot`` and ``publication`` are
    named after the pipeline unless told otherwise; ``create`` makes them where they are absent. ``lanes: 1`` keeps the
    order of commits, more keep the order of each key. ``unchanged`` stands for a value that Postgres did not send;
    without it the value is left out. ``segments`` is where the log is read ahead to, by default under the
    checkpoint."""

    dsn: Annotated[str, AfterValidator(_dsn)] = Field(repr=False)
    password_file: NonEmpty | None = None
    tables: Annotated[list[NonEmpty], Field(min_length=1)]
    slot: Annotated[str, Field(pattern=_SLOT)] | None = None
    publication: NonEmpty | None = None
    create: bool = False
    snapshot: Literal["never", "initial", "always"] = "initial"
    lanes: Annotated[int, Field(ge=1, le=64)] = 1
    numeric: Annotated[str, Field(pattern=_NUMERIC)] = "text"
    unchanged: NonEmpty | None = None
    exclude: list[Annotated[str, AfterValidator(_column)]] = Field(default_factory=list)
    max_bytes: Annotated[Size, Field(ge=1 << 20)] = 1 << 30
    chunk_rows: Annotated[int, Field(ge=1)] = 100_000
    segments: NonEmpty | None = None
    connect_timeout: Annotated[Duration, Field(ge=1000)] = 10_000

    @model_validator(mode="after")
    def _no_comma(self) -> PostgresConfig:
        for name in (*self.tables, *self.exclude):
            if "," in name:
                raise PydanticCustomError("tables", "a name with a comma cannot be given; a glob can: ? stands for it")
        return self


class PostgresSource(Source):
    type: Literal["postgres"]
    config: PostgresConfig
    bounds = frozenset({"max_events", "max_bytes"})
    has_slot = True

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from pyspark.sql import functions as F

        changes = session.readStream.format(POSTGRES_FORMAT).options(**self._options(opening)).load()
        columns = {name: F.col(f"`{name}`") for name in changes.columns}
        columns["name"] = F.lit(self._name(opening.pipeline))
        # A name of a closed alphabet with digits behind it; the name itself; one letter.
        return event_frame(changes, columns, plain=("id", "name", "op"))

    def secrets(self) -> Iterator[str]:
        if self._has_password():
            yield self.config.dsn

    def problems_before_start(self, pipeline: str, *, begun: bool, master: str) -> Iterator[str]:
        from millstream.cdc import refusal

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
        why = refusal(self.login(), self.wanted(pipeline), begun=begun)
        if why is not None:
            yield why

    def finished(self, opening: Opening, end: Any) -> None:
        from millstream.cdc import acknowledge_end

        acknowledge_end(self.login(), self.slot(opening.pipeline), end)

    def slot_status(self, pipeline: str) -> SlotStatus | None:
        from millstream.cdc import slot_status

        return slot_status(self.login(), self.slot(pipeline))

    def leftover(self, pipeline: str) -> Leftover | None:
        name, found = self.slot(pipeline), self.slot_status(pipeline)
        if found is None:
            return None
        what = f"slot {name} at {self.login().shown} stays, and makes the server keep {found.held_bytes:,} bytes of log"
        return Leftover(what, lambda: self._remove(name))

    def _remove(self, slot: str) -> None:
        from millstream.cdc import drop

        if not drop(self.login(), slot):
            log.warning("the slot was gone already")
        if self.config.segments is not None:  # those under the checkpoint went with it
            shutil.rmtree(self.config.segments, ignore_errors=True)

    def order(self) -> str | None:
        return "that of commits" if self.config.lanes == 1 else "that of each key's changes (lanes)"

    def can_fail(self) -> bool:
        return False

    def identity(self) -> dict[str, Any]:
        c = self.config
        return {"server": self.login().shown, "slot": c.slot, "publication": c.publication}

    def slot(self, pipeline: str) -> str:
        """Its name: a slot's alphabet is narrower than a pipeline's."""
        return self.config.slot or "millstream_" + re.sub(r"[^a-z0-9_]", "_", pipeline.lower())[:50]

    def login(self) -> Login:
        from millstream.cdc import Login

        return Login(self.config.dsn, self.config.password_file, None, max(1, self.config.connect_timeout // 1000))

    def wanted(self, pipeline: str) -> Wanted:
        from millstream.cdc import Wanted

        c, slot = self.config, self.slot(pipeline)
        return Wanted(tuple(c.tables), slot, c.publication or slot, c.create)

    def _options(self, opening: Opening) -> dict[str, str]:
        c = self.config
        options = {
            "dsnFile" if self._has_password() else "dsn": self._address(opening),
            "tables": ",".join(c.tables),
            "slot": self.slot(opening.pipeline),
            "publication": self.wanted(opening.pipeline).publication,
            "create": str(c.create).lower(),
            "snapshot": c.snapshot,
            "segments": c.segments or f"{opening.checkpoint}/segments",
            "sourceName": self._name(opening.pipeline),
            "lanes": str(c.lanes),
            "numeric": c.numeric,
            "exclude": ",".join(c.exclude),
            "maxBytes": str(c.max_bytes),
            "maxChangesPerTrigger": str(opening.max_events),
            "chunkRows": str(min(c.chunk_rows, opening.max_events)),
        }
        given = {"passwordFile": c.password_file, "unchanged": c.unchanged, "maxBytesPerTrigger": opening.max_bytes}
        return options | {name: str(value) for name, value in given.items() if value is not None}

    def _address(self, opening: Opening) -> str:
        return opening.secrets.file(self.config.dsn) if self._has_password() else self.config.dsn

    def _has_password(self) -> bool:
        return has_secret(self.config.dsn) or re.search(r"\bpassword\s*=", self.config.dsn) is not None

    def _name(self, pipeline: str) -> str:
        return self.config.id or pipeline
