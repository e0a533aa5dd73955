"""PostgreSQL with random writers while the reader is killed repeatedly; a strict ledger."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from following import DyingFollower
from ledger_run import StubbornFollower, finish, run
from random_writers import TABLES

from millstream.testing import PostgresDatabase, PostgresProcess

TRIALS = int(os.environ.get("TRIALS", "3"))
KILLS = 2 + TRIALS
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))

pytestmark = pytest.mark.timeout(120 + 60 * TRIALS)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_every_change_arrives_exactly_once_and_matches_the_previous_row(
    postgres: PostgresDatabase, tmp_path: Path, trial: int
) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-{trial}")
    follower = DyingFollower(
        postgres, tmp_path / "segments", chance=chance, chunkRows="7", segmentsShared=str(trial != 1).lower()
    )
    ledger = run(postgres, follower, SEED + 10 * trial)
    events, transactions, deaths = sum(ledger.ids.values()), len(ledger.transactions), follower.deaths
    print(f"ledger: {events} ids, {transactions} transactions, {deaths} deaths, {len(ledger.verdict())} complaints")
    assert ledger.verdict() == []
    assert follower.deaths > 3
    assert sum(ledger.ids.values()) > 300


@pytest.mark.chaos
def test_repeatedly_killed_database_loses_no_change(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    chance, kills = random.Random(f"{SEED}-killed"), 0
    with PostgresProcess() as server:
        stop = threading.Event()

        def kill() -> None:
            nonlocal kills
            delivered = -1
            while not stop.wait(1 + 3 * chance.random()):
                if follower.given == delivered:
                    continue  # killing a server before a client has connected tests nothing
                delivered = follower.given
                server.kill()
                server.start()
                kills += 1

        follower = StubbornFollower(server.main, tmp_path / "segments", chance=random.Random(SEED), chunkRows="7")
        killer = threading.Thread(target=kill)
        server.main.execute(*TABLES)
        follower.start = follower.reader.initialOffset()
        killer.start()
        try:
            ledger = run(server.main, follower, SEED, whole=False, enough=lambda: kills >= KILLS)
        finally:
            stop.set()
            killer.join()
        finish(server.main, follower, ledger)
        print(f"ledger: {sum(ledger.ids.values())} ids, {len(ledger.transactions)} transactions, {kills} kills")
        assert ledger.verdict() == []
