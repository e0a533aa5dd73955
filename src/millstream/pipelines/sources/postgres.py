"""PostgreSQL as a source, through Spark's ``postgres_changes`` format: the rows that are there, then every change.

An event's id is the source's name, the transaction's place in the log, and the change's number in it.
"""

from __future__ import annotations

import logging
import re
import shutil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from millstream.cdc import POSTGRES_FORMAT
from millstream.pipelines.events import event_frame
from millstream.pipelines.sources.database import DatabaseConfig, DatabaseSource
from millstream.pipelines.sources.source import Leftover, Opening
from millstream.pipelines.spec.part import NonEmpty, written_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc import Login, SlotStatus, Wanted

log = logging.getLogger("millstream.pipelines")

_SLOT = r"^[a-z0-9_]{1,63}$"


def _dsn(text: str) -> str:
    """libpq's own two forms. Its parser says the rest when the pipeline starts."""
    if not text.startswith(("postgresql://", "postgres://")) and not re.search(
        r"(^|\s)(host|dbname|service)\s*=", text
    ):
        raise PydanticCustomError("dsn", "write postgresql://user@host:5432/database")
    return text


class PostgresConfig(DatabaseConfig):
    """``tables`` are names or globs, of the schema ``public`` where they name none. ``slot`` and ``publication`` are
    named after the pipeline unless told otherwise; ``create`` makes them where they are absent. ``unchanged`` stands
    for a value that Postgres did not send; without it the value is left out."""

    dsn: Annotated[str, AfterValidator(_dsn)] = Field(repr=False)
    slot: Annotated[str, written_as(_SLOT, "1 to 63 small letters, digits and underscores")] | None = None
    publication: NonEmpty | None = None
    create: bool = False
    unchanged: NonEmpty | None = None


class PostgresSource(DatabaseSource):
    type: Literal["postgres"]
    config: PostgresConfig
    has_slot = True

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from pyspark.sql import functions as F

        changes = session.readStream.format(POSTGRES_FORMAT).options(**self._options(opening)).load()
        columns = {name: F.col(f"`{name}`") for name in changes.columns}
        columns["name"] = F.lit(self.source_name(opening.pipeline))
        # A name of a closed alphabet with digits behind it; the name itself; one letter.
        return event_frame(changes, columns, plain=("id", "name", "op"))

    def refused(self, pipeline: str, *, begun: bool) -> str | None:
        from millstream.cdc import refusal

        return refusal(self.login(), self.wanted(pipeline), begun=begun)

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
        later = f"to drop it later, run there: SELECT pg_drop_replication_slot('{name}');"
        return Leftover(what, lambda: self._remove(name), later)

    def _remove(self, slot: str) -> None:
        from millstream.cdc import drop

        if not drop(self.login(), slot):
            log.warning("the slot was gone already")
        if self.config.segments is not None:  # those under the checkpoint went with it
            shutil.rmtree(self.config.segments, ignore_errors=True)

    def identity(self) -> dict[str, Any]:
        c = self.config
        return {"server": self.login().shown, "slot": c.slot, "publication": c.publication}

    def slot(self, pipeline: str) -> str:
        """Its name: a slot's alphabet is narrower than a pipeline's."""
        return self.config.slot or "millstream_" + re.sub(r"[^a-z0-9_]", "_", pipeline.lower())[:50]

    def login(self) -> Login:
        from millstream.cdc import Login

        return Login(self.address())

    def wanted(self, pipeline: str) -> Wanted:
        from millstream.cdc import Wanted

        c, slot = self.config, self.slot(pipeline)
        return Wanted(tuple(c.tables), slot, c.publication or slot, c.create)

    def _options(self, opening: Opening) -> dict[str, str]:
        options = self.shared_options(opening) | {
            "slot": self.slot(opening.pipeline),
            "publication": self.wanted(opening.pipeline).publication,
            "create": str(self.config.create).lower(),
        }
        return options if self.config.unchanged is None else options | {"unchanged": self.config.unchanged}
