"""The Spark data sources ``postgres_changes`` and ``mariadb_changes``. Each database's ``database.py`` has its options.

Spark's Python workers import this module at start, so other modules are imported in the methods that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from millstream.cdc import MARIADB_FORMAT, POSTGRES_FORMAT

if TYPE_CHECKING:
    from millstream.cdc.reader import ChangesReader


class PostgresChangesSource(DataSource):
    """Changes of a PostgreSQL database. Spark creates one on the driver for each plan and pickles it to the tasks."""

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
    """Changes of a MariaDB database."""

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
