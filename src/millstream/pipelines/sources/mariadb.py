"""MariaDB as a source, through Spark's ``mariadb_changes`` format: the rows that are there, then every change.

An event's id is the source's name, the transaction's place in the binary log, and the change's number in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from millstream.cdc import MARIADB_FORMAT
from millstream.pipelines.events import event_frame
from millstream.pipelines.sources.database import DatabaseConfig, DatabaseSource
from millstream.pipelines.sources.source import Opening

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millstream.cdc import BinlogStatus, MariadbLogin


def _dsn(text: str) -> str:
    if not text.startswith("mariadb://"):
        raise PydanticCustomError("dsn", "write mariadb://user@host:3306/database")
    return text


class MariadbConfig(DatabaseConfig):
    """``tables`` are names or globs, of the dsn's database where they name none. ``server_id`` is the number by which
    the server knows this reader; by default it is made from the pipeline's name."""

    dsn: Annotated[str, AfterValidator(_dsn)] = Field(repr=False)
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
        return event_frame(changes, columns, plain=("id", "name", "op"))

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
