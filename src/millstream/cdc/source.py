"""The Spark formats of this room: options in, a reader out. Each database's ``database.py`` lists its options.

Spark's workers load this module and no more, so that what it needs is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from millstream.cdc import MARIADB_FORMAT, POSTGRES_FORMAT

if TYPE_CHECKING:
    from millstream.cdc.reader import ChangesReader


class PostgresChangesSource(DataSource):
    """Made on the driver, anew for every plan; travels to the tasks as a pickle."""

    @classmethod
    def name(cls) -> str:
        return POSTGRES_FORMAT

    def schema(self) -> str:
        from millstream.cdc.decoding import DDL

        return DDL

    def streamReader(self, schema: StructType) -> ChangesReader:
        from millstream.cdc.postgres.database import Postgres, change_options
        from millstream.cdc.reader import ChangesReader

        return ChangesReader(Postgres(change_options(self.options)))


class MariadbChangesSource(DataSource):
    """The same for MariaDB."""

    @classmethod
    def name(cls) -> str:
        return MARIADB_FORMAT

    def schema(self) -> str:
        from millstream.cdc.decoding import DDL

        return DDL

    def streamReader(self, schema: StructType) -> ChangesReader:
        from millstream.cdc.mariadb.database import Mariadb, mariadb_options
        from millstream.cdc.reader import ChangesReader

        return ChangesReader(Mariadb(mariadb_options(self.options)))
