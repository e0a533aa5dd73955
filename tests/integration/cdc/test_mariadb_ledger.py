"""MariaDB with random writers while the reader, and then the server, is killed repeatedly; a strict ledger."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from following import DyingFollower
from ledger_run import StubbornFollower, finish, run, tables
from random_writers import MariadbWriters

from millstream.testing import MariadbDatabase, MariadbProcess, mariadb_server

TRIALS = int(os.environ.get("TRIALS", "3"))
KILLS = 2 + TRIALS
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))

pytestmark = pytest.mark.timeout(120 + 60 * TRIALS)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_every_change_arrives_exactly_once_and_matches_the_previous_row(
    mariadb: MariadbDatabase, tmp_path: Path, trial: int
) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-{trial}")
    follower = DyingFollower(
        mariadb, tmp_path / "segments", chance=chance, chunkRows="7", segmentsShared=str(trial != 1).lower()
    )
    ledger = run(mariadb, follower, SEED + 10 * trial)
    events, transactions, deaths = sum(ledger.ids.values()), len(ledger.transactions), follower.deaths
    print(f"ledger: {events} ids, {transactions} transactions, {deaths} deaths, {len(ledger.verdict())} complaints")
    assert ledger.verdict() == []
    assert follower.deaths > 3
    assert sum(ledger.ids.values()) > 300


@pytest.mark.chaos
def test_repeatedly_killed_database_loses_no_change(tmp_path: Path) -> None:
    """Kills whenever rows have arrived since the last kill, but not within a TRUNCATE: a MariaDB 10.11 that dies in one
    may have emptied the table without logging it (after 28 of 86 kills), which no reader of the log can detect."""
    if mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    print(f"SEED={SEED}")
    chance, kills = random.Random(f"{SEED}-killed"), 0
    with MariadbProcess() as server:
        database, stop = server.fresh_database(), threading.Event()

        def kill() -> None:
            nonlocal kills
            delivered = -1
            while not stop.wait(1 + 3 * chance.random()):
                if follower.given == delivered:
                    continue  # killing a server before a client has connected tests nothing
                delivered = follower.given
                with MariadbWriters.truncating:
                    server.kill()
                server.start()
                kills += 1

        follower = StubbornFollower(database, tmp_path / "segments", chance=random.Random(SEED), chunkRows="7")
        killer = threading.Thread(target=kill)
        database.execute(*tables(database))
        follower.start = follower.reader.initialOffset()
        killer.start()
        try:
            ledger = run(database, follower, SEED, whole=False, enough=lambda: kills >= KILLS)
        finally:
            stop.set()
            killer.join()
        finish(database, follower, ledger)
        print(f"ledger: {sum(ledger.ids.values())} ids, {len(ledger.transactions)} transactions, {kills} kills")
        assert ledger.verdict() == []
