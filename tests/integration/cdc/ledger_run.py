"""A snapshot while random writers run, then their changes, checked strictly: the same run for every database."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from following import DyingFollower, Follower
from random_writers import MARIADB_TABLES, TABLES, MariadbWriters, Writers
from strict_ledger import StrictLedger

from millstream.cdc.errors import SourceUnreachable
from millstream.testing import MariadbDatabase, PostgresDatabase, wait_until

Database = PostgresDatabase | MariadbDatabase

LIMIT = 50
LEAD = 10
"""Number of transactions, of about five changes each."""


def tables(database: Database) -> tuple[str, ...]:
    return TABLES if isinstance(database, PostgresDatabase) else MARIADB_TABLES


def writers(database: Database, seed: int, **decoding: Any) -> Writers | MariadbWriters:
    made = Writers if isinstance(database, PostgresDatabase) else MariadbWriters
    return made(database, seed, **decoding)


def rows_of(database: Database, table: str) -> list[dict[str, Any]]:
    if isinstance(database, PostgresDatabase):
        return [row for (row,) in database.execute(f"SELECT to_jsonb(t) FROM {table} t")]
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def run(
    database: Database,
    follower: Follower,
    seed: int,
    *,
    whole: bool = True,
    enough: Callable[[], bool] = lambda: True,
) -> StrictLedger:
    """``whole``: makes the tables before, and finishes behind."""
    if whole:
        database.execute(*tables(database))
    before = writers(database, seed, truncate=False, allowed=100).start()
    wait_until(before.spent, what="rows for the snapshot", timeout_s=60)
    before.stop()
    ledger = StrictLedger()
    follow(
        follower,
        writers(database, seed + 1, allowed=LEAD),
        ledger,
        enough=lambda: sum(ledger.ids.values()) >= 400 and enough(),
    )
    if whole:
        finish(database, follower, ledger)
    return ledger


def follow(
    follower: Follower,
    during: Writers | MariadbWriters,
    ledger: StrictLedger,
    *,
    batches: int = 30,
    enough: Callable[[], bool] = lambda: True,
) -> None:
    """Follows until ``enough``, and for a minimum number of batches.

    Each batch allows the writers about as many further transactions as it has read. Writers without a limit would
    outrun a follower on a busy machine: the further it is behind, the more its batches cost, so it would never end.
    """
    during.start()
    try:
        while ledger.batch < batches or not enough():
            rows = follower.batch(limit=LIMIT)
            if rows is not None:
                ledger.apply(rows)
                during.go_on(LEAD)
            elif during.spent():
                during.go_on(1)  # earlier transactions may have changed nothing, or their changes were not read yet
            time.sleep(0.01)
    finally:
        during.stop()


def finish(database: Database, follower: Follower, ledger: StrictLedger) -> None:
    """Reads the remaining log, and compares the result with the tables."""
    follower.reader.prepareForTriggerAvailableNow()
    while (rows := follower.batch(limit=1000)) is not None:
        ledger.apply(rows)
    follower.stop()
    ledger.compare("words", rows_of(database, "words"), ("word",))
    ledger.compare("pairs", rows_of(database, "pairs"), follower.pair_key)


class StubbornFollower(DyingFollower):
    """Retries while the server is unreachable, as Spark and the pipeline do."""

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
