"""Databases as sources: PostgreSQL through Spark's format ``postgres_changes``, MariaDB through ``mariadb_changes``.

Each gives the rows that are there, then every change. An event's id is the source's name, the transaction's place in
the log, and the change's number in it. Both share options, secrets, where segments lie, and what must be so at a start.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.cdc import MARIADB_FORMAT, POSTGRES_FORMAT
from millstream.pipelines.events import event_frame
from millstream.pipelines.redis_address import has_secret
from millstream.pipelines.sources.source import Leftover, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, Size, written_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc import BinlogStatus, DatabaseAddress, Login, MariadbLogin, SlotStatus, Wanted

_LEAST_CHUNK = 10_000
"""Rows for which a chunk's connection, transaction and file are little work, beside the rows themselves."""
_PLAIN = re.compile(r"[A-Za-z0-9_. -]*")
"""Names that JSON writes as they are, and that are no globs."""
_NUMERIC = r"^(text|double|decimal\(([0-9]|[12][0-9]|3[0-8])\))$"
log = logging.getLogger("millstream.pipelines")

_SLOT = r"^[a-z0-9_]{1,63}$"


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

    def login(self) -> Login | MariadbLogin:
        raise AssertionError("every database has its own")

    def address(self) -> DatabaseAddress:
        from millstream.cdc import DatabaseAddress

        c = self.config
        return DatabaseAddress(c.dsn, c.password_file, connect_s=max(1, c.connect_timeout // 1000))

    def source_name(self, pipeline: str) -> str:
        return self.config.id or pipeline

    def plain(self) -> set[str]:
        """Columns whose text needs no escaping in JSON, whatever the row: an id is the source's name, which is of a
        closed alphabet, with digits behind it; an op is a letter. Looking at every row's names is dear: so those that
        the spec writes out are looked at here, once."""
        return {"id", "name", "op"} | self.plain_names()

    def plain_names(self) -> set[str]:
        """Of the columns that name a table those that are written out in the spec, and need no escaping."""
        raise AssertionError("every database has its own")

    def tables_are_plain(self) -> bool:
        """A glob takes any name, whatever is in it."""
        return all(_PLAIN.fullmatch(name) for name in self.config.tables)

    def database_is_plain(self) -> bool:
        """A variable is replaced by every process for itself."""
        return "$" not in self.config.dsn and _PLAIN.fullmatch(self.login().database) is not None

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
            "chunkRows": str(_even_chunk(c.chunk_rows, opening.max_events, opening.partitions)),
        }
        given: dict[str, Any] = {"passwordFile": c.password_file, "maxBytesPerTrigger": opening.max_bytes}
        return options | {name: str(value) for name, value in given.items() if value is not None}

    def _has_password(self) -> bool:
        return has_secret(self.config.dsn) or re.search(r"\bpassword\s*=", self.config.dsn) is not None


def _even_chunk(most: int, max_events: int, at_once: int) -> int:
    """Rows in a chunk, ``most`` at most, so that the chunks of a batch fill all tasks that run at once, to its end."""
    rounds = -(-max_events // (most * at_once))
    return min(most, max_events, max(_LEAST_CHUNK, max_events // (rounds * at_once)))


def _postgres_dsn(text: str) -> str:
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

    dsn: Annotated[str, AfterValidator(_postgres_dsn)] = Field(repr=False)
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
        return event_frame(changes, columns, plain=self.plain())

    def plain_names(self) -> set[str]:
        own = {"db"} if self.database_is_plain() else set()
        return own | ({"schema", "table"} if self.tables_are_plain() else set())

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


def _mariadb_dsn(text: str) -> str:
    if not text.startswith("mariadb://"):
        raise PydanticCustomError("dsn", "write mariadb://user@host:3306/database")
    return text


class MariadbConfig(DatabaseConfig):
    """``tables`` are names or globs, of the dsn's database where they name none. ``server_id`` is the number by which
    the server knows this reader; by default it is made from the pipeline's name."""

    dsn: Annotated[str, AfterValidator(_mariadb_dsn)] = Field(repr=False)
    server_id: Annotated[int, Field(ge=1, le=0xFFFFFFFF)] | None = None


class MariadbSource(DatabaseSource):
    type: Literal["mariadb"]
    config: MariadbConfig
    has_log = True

    def open(self, session: SparkSession, opening: Opening) -> DataFrame:
        from pyspark.sql import functions as F

        options = self.shared_options(opening)
        if self.config.server_id is not None:
            options["serverId"] = str(self.config.server_id)
        changes = session.readStream.format(MARIADB_FORMAT).options(**options).load()
        columns = {name: F.col(f"`{name}`") for name in changes.columns}
        columns["name"] = F.lit(self.source_name(opening.pipeline))
        return event_frame(changes, columns, plain=self.plain())

    def plain_names(self) -> set[str]:
        # A schema is a database here, and the dsn's is the one of tables that name none.
        whole = self.tables_are_plain() and self.database_is_plain()
        return {"db", "table"} if whole else set()

    def refused(self, pipeline: str, *, begun: bool) -> str | None:
        from millstream.cdc import binlog_refusal

        return binlog_refusal(self.login(), self.config.tables)

    def log_status(self, end: Any) -> BinlogStatus:
        from millstream.cdc import binlog_status

        return binlog_status(self.login(), end)

    def identity(self) -> dict[str, Any]:
        return {"server": self.login().shown}

    def login(self) -> MariadbLogin:
        from millstream.cdc import MariadbLogin

        return MariadbLogin(self.address())
