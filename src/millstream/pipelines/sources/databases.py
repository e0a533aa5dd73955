"""Databases as sources: PostgreSQL through Spark's format ``postgres_changes``, MariaDB through ``mariadb_changes``.

Each reads the existing rows, then every change. An event's id is the source's name, the transaction's position in the
log, and the change's number in it. Both share options, secrets, the place of segments, and the checks at the start.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.cdc import MARIADB_FORMAT, POSTGRES_FORMAT
from millstream.pipelines.events import event_frame
from millstream.pipelines.redis_address import has_secret
from millstream.pipelines.sources.source import Leftover, Opening, Source, SourceConfig
from millstream.pipelines.spec.part import Duration, NonEmpty, Size, written_as
from millstream.storage import has_scheme

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc.mariadb.connection import MariadbLogin
    from millstream.cdc.mariadb.database import BinlogStatus
    from millstream.cdc.options import DatabaseAddress
    from millstream.cdc.postgres.connection import Login
    from millstream.cdc.postgres.database import SlotStatus
    from millstream.cdc.postgres.preparation import SlotConfig

_LEAST_CHUNK = 10_000
"""With this many rows, a chunk's connection, transaction and file cost little in comparison."""
_PLAIN = re.compile(r"[A-Za-z0-9_. -]*")
"""Names that need no escaping in JSON, and that are not globs."""
_NUMERIC = r"^(text|double|decimal\(([0-9]|[12][0-9]|3[0-8])\))$"
log = logging.getLogger("millstream.pipelines")

_SLOT = r"^[a-z0-9_]{1,63}$"
_MAX_NAME_IN_SLOT = 50
"""Characters of a pipeline's name in its slot's name."""


def _column(text: str) -> str:
    if text.count(".") != 2:
        raise PydanticCustomError("column", "write schema.table.column")
    return text


def _directory(text: str) -> str:
    if has_scheme(text):
        raise PydanticCustomError("segments", "write a directory of the driver. For a store, set checkpoint.path")
    return text


class DatabaseConfig(SourceConfig):
    """Options of both databases."""

    dsn: str = Field(repr=False)
    password_file: NonEmpty | None = None
    """A file with the password for ``dsn``. The driver and every executor read it."""
    tables: Annotated[list[NonEmpty], Field(min_length=1)]
    """Names or globs of the tables to follow. A name without a schema (MariaDB: a database) is in ``public`` (MariaDB:
    in the dsn's database)."""
    snapshot: Literal["never", "initial", "always"] = "initial"
    """``initial``: the existing rows, then changes; ``always``: the rows again at every start; ``never``: only
    changes."""
    partitions: Annotated[int, Field(ge=1, le=64)] = 1
    """1: one task, in the order of commits. More: parallel tasks, which keep the order of each key."""
    numeric: Annotated[str, written_as(_NUMERIC, "text, double, or decimal(n) with n from 0 to 38")] = "text"
    """The form of exact numbers in JSON: ``text``, ``double``, or ``decimal(n)`` with n digits after the decimal
    point."""
    exclude: list[Annotated[str, AfterValidator(_column)]] = Field(default_factory=list)
    """Columns to omit from events, as ``schema.table.column``."""
    max_bytes: Annotated[Size, Field(ge=1 << 20)] = 1 << 30
    """The maximum size of the read-ahead log. Beyond it the database keeps the log."""
    chunk_rows: Annotated[int, Field(ge=1)] = 100_000
    """The maximum number of rows in one chunk of a snapshot, approximately."""
    on_table_change: Literal["stop", "snapshot"] = "stop"
    """If a followed table is replaced: ``stop`` ends the pipeline with an error, ``snapshot`` takes a new snapshot of
    the table."""
    segments: Annotated[NonEmpty, AfterValidator(_directory)] | None = None
    """A directory of the driver for the read-ahead log and the chunks of snapshots. By default under the checkpoint."""
    connect_timeout: Annotated[Duration, Field(ge=1000)] = 10_000
    """How long opening one connection may take."""

    @model_validator(mode="after")
    def _snapshot_allowed(self) -> DatabaseConfig:
        if self.on_table_change == "snapshot" and self.snapshot == "never":
            raise PydanticCustomError("on_table_change", "with snapshot: never this can only be stop")
        return self

    @model_validator(mode="after")
    def _no_comma(self) -> DatabaseConfig:
        for name in (*self.tables, *self.exclude):
            if "," in name:
                raise PydanticCustomError(
                    "tables", "a table name cannot contain a comma here; write a glob with ? in its place"
                )
        return self


class DatabaseSource(Source):
    config: DatabaseConfig
    bounds = frozenset({"max_events", "max_bytes"})

    def secrets(self) -> Iterator[str]:
        if self._has_password():
            yield self.config.dsn

    def problems_before_start(self, pipeline: str, *, begun: bool, master: str) -> Iterator[str]:
        if not master.startswith("local") and self._has_password():
            yield (
                f"the executors of {master} are other hosts, and the password in the dsn must be on no command line. "
                "Write it into a file of mode 0600 at the same path on every host, and give password_file: /the/path"
            )
        why = self.refused(pipeline, begun=begun)
        if why is not None:
            yield why

    @abstractmethod
    def refused(self, pipeline: str, *, begun: bool) -> str | None:
        """Why the changes of the database cannot be read in its current state."""

    def order(self) -> str | None:
        return "that of commits" if self.config.partitions == 1 else "that of each key's changes (partitions)"

    def can_fail(self) -> bool:
        return False

    @abstractmethod
    def login(self) -> Login | MariadbLogin:
        """How to connect to the database."""

    def address(self) -> DatabaseAddress:
        from millstream.cdc.options import DatabaseAddress

        c = self.config
        return DatabaseAddress(c.dsn, c.password_file, connect_s=max(1, c.connect_timeout // 1000))

    def source_name(self, pipeline: str) -> str:
        return self.config.id or pipeline

    def plain(self) -> set[str]:
        """Columns whose text never needs escaping in JSON: an id is the source's name, which has a restricted alphabet,
        followed by digits; an op is a letter. Checking the names of every row is expensive, so names that the spec
        writes out are checked here, once."""
        return {"id", "name", "op"} | self.plain_names()

    @abstractmethod
    def plain_names(self) -> set[str]:
        """The columns with a table's name that the spec writes out, and that need no escaping."""

    def tables_are_plain(self) -> bool:
        """False for a glob, which matches any name."""
        return all(_PLAIN.fullmatch(name) for name in self.config.tables)

    def database_is_plain(self) -> bool:
        """The dsn with variables, which every process replaces itself."""
        return "$" not in self.config.dsn and _PLAIN.fullmatch(self.login().database) is not None

    def shared_options(self, opening: Opening) -> dict[str, str]:
        """Options of the Spark format that every change source has. A dsn with a password is passed in a file."""
        c, secret = self.config, self._has_password()
        options = {
            "dsnFile" if secret else "dsn": opening.secrets.file(c.dsn) if secret else c.dsn,
            "tables": ",".join(c.tables),
            "snapshot": c.snapshot,
            "segments": c.segments or f"{opening.checkpoint}/segments",
            "segmentsShared": str(opening.tasks_are_local and opening.gateway_file is None).lower(),
            "sourceName": self.source_name(opening.pipeline),
            "partitions": str(c.partitions),
            "numeric": c.numeric,
            "exclude": ",".join(c.exclude),
            "maxBytes": str(c.max_bytes),
            "maxChangesPerTrigger": str(opening.max_events),
            "onTableChange": c.on_table_change,
            "chunkRows": str(_even_chunk(c.chunk_rows, opening.max_events, opening.partitions)),
        }
        own_options: dict[str, Any] = {
            "passwordFile": c.password_file,
            "maxBytesPerTrigger": opening.max_bytes,
            "gatewayFile": opening.gateway_file,
        }
        return options | {name: str(value) for name, value in own_options.items() if value is not None}

    def _has_password(self) -> bool:
        return has_secret(self.config.dsn) or re.search(r"\bpassword\s*=", self.config.dsn) is not None


def _even_chunk(limit: int, max_events: int, at_once: int) -> int:
    """Rows in a chunk, at most ``limit``, so that the chunks of a batch keep all parallel tasks busy to its end."""
    rounds = -(-max_events // (limit * at_once))
    return min(limit, max_events, max(_LEAST_CHUNK, max_events // (rounds * at_once)))


def _postgres_dsn(text: str) -> str:
    """Accepts libpq's two forms. Its parser checks the rest when the pipeline starts."""
    if not text.startswith(("postgresql://", "postgres://")) and not re.search(
        r"(^|\s)(host|dbname|service)\s*=", text
    ):
        raise PydanticCustomError("dsn", "write postgresql://user@host:5432/database")
    return text


class PostgresConfig(DatabaseConfig):
    """Options of the source ``postgres``."""

    dsn: Annotated[str, AfterValidator(_postgres_dsn)] = Field(repr=False)
    """The address of the database, as a URI or as key=value pairs of libpq."""
    slot: Annotated[str, written_as(_SLOT, "1 to 63 small letters, digits and underscores")] | None = None
    """The name of the replication slot. By default ``millstream_<pipeline>``."""
    publication: NonEmpty | None = None
    """The name of the publication. By default that of the slot."""
    create: bool = False
    """true: creates the publication and the slot if they are absent, and adds missing tables to the publication."""
    unchanged: NonEmpty | None = None
    """Replaces a value that PostgreSQL did not send because it did not change. By default the value is omitted."""


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
        from millstream.cdc.postgres.database import refusal

        return refusal(self.login(), self.slot_config(pipeline), resuming=begun)

    def finished(self, opening: Opening, end: Any) -> None:
        from millstream.cdc.postgres.database import acknowledge_end

        acknowledge_end(self.login(), self.slot(opening.pipeline), end)

    def slot_status(self, pipeline: str) -> SlotStatus | None:
        from millstream.cdc.postgres.database import slot_status

        return slot_status(self.login(), self.slot(pipeline))

    def leftover(self, pipeline: str) -> Leftover | None:
        name, status = self.slot(pipeline), self.slot_status(pipeline)
        if status is None:
            return None
        server = self.login().display_address
        text = f"slot {name} at {server} remains; the server keeps {status.held_bytes:,} bytes of log for it"
        later = f"to drop it later, run there: SELECT pg_drop_replication_slot('{name}');"
        return Leftover(text, lambda: self._remove(name), later)

    def _remove(self, slot: str) -> None:
        from millstream.cdc.postgres.preparation import drop

        if not drop(self.login(), slot):
            log.warning("the slot was gone already")
        if self.config.segments is not None:  # segments under the checkpoint were removed with it
            shutil.rmtree(self.config.segments, ignore_errors=True)

    def identity(self) -> dict[str, Any]:
        c = self.config
        return {"server": self.login().display_address, "slot": c.slot, "publication": c.publication}

    def slot(self, pipeline: str) -> str:
        """Its name. A slot's alphabet is narrower than a pipeline's: a name that does not fit is changed, and gets a
        digest, so that ``my-shop`` and ``my_shop`` have slots of their own."""
        if self.config.slot:
            return self.config.slot
        name = re.sub(r"[^a-z0-9_]", "_", pipeline.lower())
        if name != pipeline or len(name) > _MAX_NAME_IN_SLOT:
            digest = hashlib.sha256(pipeline.encode()).hexdigest()[:8]
            name = f"{name[: _MAX_NAME_IN_SLOT - 9]}_{digest}"
        return f"millstream_{name}"

    def login(self) -> Login:
        from millstream.cdc.postgres.connection import Login

        return Login(self.address())

    def slot_config(self, pipeline: str) -> SlotConfig:
        from millstream.cdc.postgres.preparation import SlotConfig

        c, slot = self.config, self.slot(pipeline)
        return SlotConfig(tuple(c.tables), slot, c.publication or slot, c.create, frozenset(c.exclude))

    def _options(self, opening: Opening) -> dict[str, str]:
        options = self.shared_options(opening) | {
            "slot": self.slot(opening.pipeline),
            "publication": self.slot_config(opening.pipeline).publication,
            "create": str(self.config.create).lower(),
        }
        return options if self.config.unchanged is None else options | {"unchanged": self.config.unchanged}


def _mariadb_dsn(text: str) -> str:
    if not text.startswith("mariadb://"):
        raise PydanticCustomError("dsn", "write mariadb://user@host:3306/database")
    return text


class MariadbConfig(DatabaseConfig):
    """Options of the source ``mariadb``."""

    dsn: Annotated[str, AfterValidator(_mariadb_dsn)] = Field(repr=False)
    """The address of the database: ``mariadb://user@host:3306/database``."""
    server_id: Annotated[int, Field(ge=1, le=0xFFFFFFFF)] | None = None
    """The number by which the server identifies this reader. By default a random number at each start."""


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
        # A schema is a database here; tables without one are in the dsn's.
        whole = self.tables_are_plain() and self.database_is_plain()
        return {"db", "table"} if whole else set()

    def refused(self, pipeline: str, *, begun: bool) -> str | None:
        from millstream.cdc.mariadb.database import binlog_refusal

        return binlog_refusal(self.login(), self.config.tables, frozenset(self.config.exclude))

    def log_status(self, end: Any) -> BinlogStatus:
        from millstream.cdc.mariadb.database import binlog_status

        return binlog_status(self.login(), end)

    def identity(self) -> dict[str, Any]:
        return {"server": self.login().display_address}

    def login(self) -> MariadbLogin:
        from millstream.cdc.mariadb.connection import MariadbLogin

        return MariadbLogin(self.address())
