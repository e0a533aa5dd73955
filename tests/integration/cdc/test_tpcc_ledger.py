"""A load like TPC-C at PostgreSQL's full rate: the tables that are rebuilt from the stream equal the database's, and
the ledger detects one change that is missing, repeated or out of order."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from following import DyingFollower, Event

from benchmarks.tpcc_load import Change, Tables, TpccLedger, TpccLoad
from millstream.testing import PostgresDatabase

TRIALS = int(os.environ.get("TRIALS", "1"))
TRANSACTIONS = 600 * TRIALS
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
PLANTED = 10
"""Faults of each kind, one at a time."""

pytestmark = pytest.mark.timeout(120 + 30 * TRIALS)


def changes_of(events: Sequence[Event]) -> list[Change]:
    return [
        Change(event["id"], event["op"], event["table"], event["key"], event["after"] and json.loads(event["after"]))
        for event in events
    ]


def read_under_load(load: TpccLoad, directory: Path, chance: random.Random) -> list[Change]:
    """The snapshot, then the changes of the load, read by a reader that is killed again and again."""
    rows = load.prepare()
    follower = DyingFollower(load.database, directory, chance=chance, chunkRows="100")
    try:
        changes = changes_of(follower.drain())
        assert len(changes) == rows
        report = load.run(seed=chance.randrange(10**6), transactions=TRANSACTIONS)
        load.write_last()
        changes += changes_of(follower.drain(limit=1000))
        print(f"{report.transactions} transactions, {report.per_s:.0f}/s; {follower.deaths} deaths of the reader")
        assert changes[-1].is_last
        assert report.transactions >= TRANSACTIONS
        return changes
    finally:
        follower.stop()


def verdict(changes: Sequence[Change], stored: Tables) -> TpccLedger:
    ledger = TpccLedger()
    ledger.apply(changes)
    ledger.compare(stored)
    return ledger


def test_tables_rebuilt_from_the_stream_equal_the_database_and_planted_faults_are_detected(
    postgres: PostgresDatabase, tmp_path: Path
) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(SEED)
    load = TpccLoad(postgres, warehouses=1, customers=20, items=50)
    changes = read_under_load(load, tmp_path / "segments", chance)
    stored = load.tables()
    ledger = verdict(changes, stored)
    print(f"ledger: {ledger.changes} changes, {ledger.transactions} transactions, {len(ledger.faults)} faults")
    assert ledger.faults == []
    assert {change.op for change in changes} == set("rcud")

    for plant in (dropped, dropped_and_renumbered, repeated, repeated_and_renumbered, swapped, swapped_under_their_ids):
        for _ in range(PLANTED):
            description, faulty = plant(changes, chance)
            assert verdict(faulty, stored).faults, f"{plant.__name__}: {description}"


Plant = Callable[[list[Change], random.Random], tuple[str, list[Change]]]


def dropped(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    at = _any(changes, chance)
    return str(changes[at]), changes[:at] + changes[at + 1 :]


def dropped_and_renumbered(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    """Drops a change as if the database had never logged it: ids have no gap."""
    description, faulty = dropped(changes, chance)
    return description, _renumbered(faulty)


def repeated(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    at = _any(changes, chance)
    return str(changes[at]), changes[: at + 1] + changes[at:]


def repeated_and_renumbered(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    description, faulty = repeated(changes, chance)
    return description, _renumbered(faulty)


def swapped(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    """Swaps any two adjacent changes."""
    at = _any(changes[:-1], chance)
    faulty = list(changes)
    faulty[at], faulty[at + 1] = faulty[at + 1], faulty[at]
    return f"{changes[at]}, {changes[at + 1]}", faulty


def swapped_under_their_ids(changes: list[Change], chance: random.Random) -> tuple[str, list[Change]]:
    """Swaps two consecutive changes of one row and keeps the ids in order."""
    latest: dict[tuple[str, str], int] = {}
    pairs = []
    for at, change in enumerate(changes):
        before = latest.get((change.table, change.key))
        latest[change.table, change.key] = at
        if before is not None and changes[before].op != "r":
            pairs.append((before, at))
    first, second = chance.choice(pairs)
    faulty = list(changes)
    faulty[first] = changes[second]._replace(id=changes[first].id)
    faulty[second] = changes[first]._replace(id=changes[second].id)
    return f"{changes[first]}, {changes[second]}", faulty


def _any(changes: Sequence[Change], chance: random.Random) -> int:
    """A change of the log; the snapshot's rows come first."""
    first = next(at for at, change in enumerate(changes) if change.op != "r")
    return chance.randrange(first, len(changes))


def _renumbered(changes: Sequence[Change]) -> list[Change]:
    numbered, place = [], (0, -1)
    for change in changes:
        if change.op == "r":
            numbered.append(change)
            continue
        lsn = change.place[0]
        place = (lsn, place[1] + 1 if lsn == place[0] else 0)
        numbered.append(change._replace(id=f"{change.id.split(':')[0]}:{lsn}:{place[1]}"))
    return numbered
