"""``spark.readStream.format("postgres_changes")``: options in, a reader out. ``options.py`` lists the options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from millstream.cdc import POSTGRES_FORMAT

if TYPE_CHECKING:
    from millstream.cdc.postgres.reader import PostgresChangesReader


class PostgresChangesSource(DataSource):
    """Made on the driver, anew for every plan; travels to the tasks as a pickle."""

    @classmethod
    def name(cls) -> str:
        return POSTGRES_FORMAT

    def schema(self) -> str:
        from millstream.cdc.frame import DDL

        return DDL

    def streamReader(self, schema: StructType) -> PostgresChangesReader:
        from psycopg import conninfo

        from millstream.cdc.postgres.options import change_options
        from millstream.cdc.postgres.reader import PostgresChangesReader

        options = change_options(self.options)
        given = conninfo.conninfo_to_dict(options.login.resolve())
        return PostgresChangesReader(options, str(given.get("dbname") or given.get("user") or ""))
