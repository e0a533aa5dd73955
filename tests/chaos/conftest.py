"""Fixtures of the trials with workers: seeded random numbers, a ledger, and worker processes that end with the test."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.crew import Crew
from millstream.testing import ClusterSetup, RedisProcess
from millstream.testing.ledger import HandlingLedger
from millstream.testing.topologies import ask

TRIALS = int(os.environ.get("TRIALS", "2"))


@pytest.fixture(params=range(TRIALS))
def chance(request: pytest.FixtureRequest) -> random.Random:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(10**6) * 100 + request.param
    print(f"SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def ledger(tmp_path: Path) -> HandlingLedger:
    return HandlingLedger(tmp_path / "ledger")


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    """All worker processes are ended, also if the test fails."""
    batch: list[Crew] = []
    yield batch
    for crew in batch:
        for process in crew.processes:
            process.kill()
            process.wait()


@pytest.fixture
def hire(crews: list[Crew], redis_server: RedisProcess, ledger: HandlingLedger, tmp_path: Path) -> Any:
    def hire(count: int, url: str | None = None, **options: Any) -> Crew:
        crew = Crew(url or redis_server.url, ledger, tmp_path / "ledger", **options)
        crews.append(crew)
        crew.hire(count)
        return crew

    return hire


@pytest.fixture(params=["redis", pytest.param("cluster", marks=pytest.mark.at_length)])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty server, or of an empty cluster of three nodes."""
    if request.param == "cluster":
        cluster: ClusterSetup = request.getfixturevalue("cluster")
        for node in cluster.nodes:
            ask(node, "FLUSHALL")
        return cluster.url
    address: str = request.getfixturevalue("redis_url")
    return address
