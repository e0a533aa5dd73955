"""A snapshot beside random writers, then their changes; the follower dies again and again. The ledger is strict."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from following import DyingFollower, Follower
from random_writers import TABLES, Writers
from strict_ledger import StrictLedger

from millstream.cdc.errors import SourceUnreachable
from millstream.testing import PostgresDatabase, PostgresProcess

TRIALS = int(os.environ.get("TRIALS", "3"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))

pytestmark = pytest.mark.timeout(120 + 60 * TRIALS)


def rows_of(database: PostgresDatabase, table: str) -> list[dict[str, Any]]:
    return [row for (row,) in database.execute(f"SELECT to_jsonb(t) FROM {table} t")]


def run(
    database: PostgresDatabase, follower: Follower, seed: int, *, batches: int = 20, whole: bool = True
) -> StrictLedger:
    """``whole``: makes the tables before, and finishes behind."""
    if whole:
        database.execute(*TABLES)
    before = Writers(database, seed, truncate=False).start()
    time.sleep(0.5)
    before.stop()
    writers = Writers(database, seed + 1).start()
    ledger = StrictLedger()
    try:
        while ledger.batch < batches or sum(ledger.ids.values()) < 400:
            rows = follower.batch(limit=20)
            if rows is None:
                time.sleep(0.01)
            else:
                ledger.apply(rows)
    finally:
        writers.stop()
    if whole:
        finish(database, follower, ledger)
    return ledger


def finish(database: PostgresDatabase, follower: Follower, ledger: StrictLedger) -> None:
    """What is left of the log, and then the tables themselves."""
    follower.reader.prepareForTriggerAvailableNow()
    while (rows := follower.batch(limit=1000)) is not None:
        ledger.apply(rows)
    follower.stop()
    ledger.compare("words", rows_of(database, "words"), ("word",))
    ledger.compare("pairs", rows_of(database, "pairs"), ("a", "b"))


@pytest.mark.parametrize("trial", range(TRIALS))
def test_every_change_comes_exactly_once_and_fits_the_row_before_it(
    postgres: PostgresDatabase, tmp_path: Path, trial: int
) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-{trial}")
    follower = DyingFollower(postgres, tmp_path / "segments", chance=chance, chunkRows="7")
    ledger = run(postgres, follower, SEED + 10 * trial)
    assert ledger.verdict() == []
    assert follower.deaths > 3
    assert sum(ledger.ids.values()) > 300


class StubbornFollower(DyingFollower):
    """Tries again while the server is away, as Spark and the pipeline do."""

    def batch(self, limit: int | None = None) -> list[Any] | None:
        while True:
            try:
                return super().batch(limit)
            except SourceUnreachable:
                time.sleep(0.1)


@pytest.mark.chaos
def test_the_database_is_killed_again_and_again(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-killed")
    with PostgresProcess() as server:
        stop = threading.Event()

        def kill() -> None:
            while not stop.wait(1 + 3 * chance.random()):
                server.kill()
                server.start()

        follower = StubbornFollower(server.main, tmp_path / "segments", chance=random.Random(SEED), chunkRows="7")
        killer = threading.Thread(target=kill)
        server.main.execute(*TABLES)
        follower.start = follower.reader.initialOffset()
        killer.start()
        try:
            ledger = run(server.main, follower, SEED, batches=10 + 2 * TRIALS, whole=False)
        finally:
            stop.set()
            killer.join()
        finish(server.main, follower, ledger)
        assert ledger.verdict() == []
