"""A snapshot beside random writers, then their changes, read strictly: the same run for every database."""

from __future__ import annotations

import time
from typing import Any

from following import DyingFollower, Follower
from random_writers import MARIADB_TABLES, TABLES, MariadbWriters, Writers
from strict_ledger import StrictLedger

from millstream.cdc.errors import SourceUnreachable
from millstream.testing import MariadbDatabase, PostgresDatabase

Database = PostgresDatabase | MariadbDatabase


def tables(database: Database) -> tuple[str, ...]:
    return TABLES if isinstance(database, PostgresDatabase) else MARIADB_TABLES


def writers(database: Database, seed: int, **how: Any) -> Writers | MariadbWriters:
    made = Writers if isinstance(database, PostgresDatabase) else MariadbWriters
    return made(database, seed, **how)


def rows_of(database: Database, table: str) -> list[dict[str, Any]]:
    if isinstance(database, PostgresDatabase):
        return [row for (row,) in database.execute(f"SELECT to_jsonb(t) FROM {table} t")]
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def run(database: Database, follower: Follower, seed: int, *, batches: int = 20, whole: bool = True) -> StrictLedger:
    """``whole``: makes the tables before, and finishes behind."""
    if whole:
        database.execute(*tables(database))
    before = writers(database, seed, truncate=False).start()
    time.sleep(0.5)
    before.stop()
    during = writers(database, seed + 1).start()
    ledger = StrictLedger()
    try:
        while ledger.batch < batches or sum(ledger.ids.values()) < 400:
            rows = follower.batch(limit=20)
            if rows is None:
                time.sleep(0.01)
            else:
                ledger.apply(rows)
    finally:
        during.stop()
    if whole:
        finish(database, follower, ledger)
    return ledger


def finish(database: Database, follower: Follower, ledger: StrictLedger) -> None:
    """What is left of the log, and then the tables themselves."""
    follower.reader.prepareForTriggerAvailableNow()
    while (rows := follower.batch(limit=1000)) is not None:
        ledger.apply(rows)
    follower.stop()
    ledger.compare("words", rows_of(database, "words"), ("word",))
    ledger.compare("pairs", rows_of(database, "pairs"), follower.pair_key)


class StubbornFollower(DyingFollower):
    """Tries again while the server is away, as Spark and the pipeline do."""

    given = 0
    """Batches that had rows."""

    def batch(self, limit: int | None = None) -> list[Any] | None:
        while True:
            try:
                rows = super().batch(limit)
                self.given += rows is not None
                return rows
            except SourceUnreachable:
                time.sleep(0.1)
