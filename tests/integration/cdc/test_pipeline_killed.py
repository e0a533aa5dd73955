"""Pipeline, executors, database and Redis are killed repeatedly. The streams equal the tables; and if a fault is
planted in that pipeline, the same ledger detects it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import planted_faults
import pytest
from killed_pipeline import KINDS, KilledPipeline

from millstream.testing import mariadb_server

TRIALS = int(os.environ.get("TRIALS", "1"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.fixture
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "mariadb" and mariadb_server() is None:
        pytest.skip("MariaDB is not installed: run `make setup`")
    return name


@pytest.mark.parametrize("trial", range(TRIALS))
def test_streams_equal_tables_after_kills(trial: int, tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    sources = ("postgres", "mariadb") if mariadb_server() is not None else ("postgres",)
    kinds = (*KINDS, *sources)
    run = KilledPipeline(sources, tmp_path, f"{SEED}-{trial}", kinds=kinds)
    for source, ledger in run.run().items():
        assert ledger.verdict() == [], source
        assert sum(ledger.ids.values()) > 200, source
    assert all(run.kills[kind] >= 1 for kind in kinds), run.kills


@pytest.mark.at_length
@pytest.mark.parametrize("source", ["postgres", "mariadb"], indirect=True)
def test_ledger_detects_chunks_filtered_by_log_position(source: str, tmp_path: Path) -> None:
    run = KilledPipeline([source], tmp_path, "cut", kinds=("pipeline",))
    if source == "postgres":
        run.planted = planted_faults.as_code(planted_faults.cut_by_lsn, str(run.segments(source)))
    else:
        run.planted = planted_faults.as_code(planted_faults.cut_by_master_status)
    assert problems(run)


@pytest.mark.at_length
@pytest.mark.parametrize("source", ["postgres", "mariadb"], indirect=True)
def test_ledger_detects_positions_acknowledged_early(source: str, tmp_path: Path) -> None:
    """If the source refuses instead (SnapshotLost: a chunk's file is gone), the planted kill has caused that: it asked
    too early what a snapshot saw that was still being read, for example one that a TRUNCATE had restarted. The planner
    asks after all chunks were read, and removes them after the answer was stored."""
    run = KilledPipeline([source], tmp_path, "early", kinds=("itself",))
    faults = (
        planted_faults.acknowledged_early,
        planted_faults.gap_not_checked,
        planted_faults.killed_after_planning,
    )
    run.planted = "".join(map(planted_faults.as_code, faults))
    assert problems(run)


def problems(run: KilledPipeline) -> list[str]:
    faults = [fault for ledger in run.run().values() for fault in ledger.verdict()]
    print("first of them:", faults[:1])
    return faults
