"""Drivers, tasks, workers and Redis are killed at random moments; afterwards every row is stored exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream import open_blocking_broker
from millstream.testing import DeliveryLedger, LoadingRedis, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

TRIALS = int(os.environ.get("TRIALS", "1"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
DRIVER = Path(__file__).with_name("spark_driver.py")
ROWS = 4000 if TRIALS >= 5 else 1500
FROM_THE_START = {"subscribe": "in", "startingOffsets": "earliest"}
SOURCE = {**FROM_THE_START, "maxOffsetsPerTrigger": str(ROWS // 8), "minPartitions": "2"}


class Driver:
    """A Spark driver as a process group of its own: a kill also ends its JVM and its workers."""

    def __init__(self, command: str, where: Path, **asked: Any) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self.errors = (where / f"driver-{random.randrange(10**9)}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), command, json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended already
        self.process.communicate()
        self.errors.close()

    def said(self) -> str:
        """The end of its standard error."""
        self.errors.seek(0)
        return self.errors.read()[-6000:]

    def finish(self, timeout_s: float = 240) -> str:
        out, _ = self.process.communicate(timeout=timeout_s)
        self.errors.seek(0)
        assert self.process.returncode == 0, self.errors.read()[-3000:]
        self.errors.close()
        return out


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Any]:
    started: list[Driver] = []

    def start(command: str, **asked: Any) -> Driver:
        started.append(Driver(command, tmp_path, **asked))
        return started[-1]

    yield start
    for driver in started:
        if driver.process.poll() is None:
            driver.kill()


def fill(url: str, count: int = ROWS) -> None:
    with open_blocking_broker(url) as broker:
        broker.xadd_many("in", [{"event": str(n)} for n in range(count)])


def balance(url: str, count: int = ROWS) -> tuple[int, int]:
    """Rows lost, and rows too many."""
    ledger = DeliveryLedger()
    ledger.sending(*range(count))
    ledger.confirmed(*range(count))
    with open_blocking_broker(url) as broker:
        stored = ledger.balance(int(entry.fields[b"event"]) for entry in broker.xrange("out"))
    assert not stored.invented
    return len(stored.lost), sum(stored.duplicated.values()) - len(stored.duplicated)


def length(url: str) -> int:
    with open_blocking_broker(url) as broker:
        return broker.xlen("out")


@pytest.mark.parametrize("trial", range(TRIALS))
def test_driver_killed_at_random_moments_loses_and_duplicates_nothing(trial: int, redis_url, drivers, tmp_path):
    chance = random.Random(f"{SEED}-{trial}")
    print(f"SEED={SEED} trial={trial}")
    fill(redis_url)
    asked = {"url": redis_url, "source": SOURCE, "checkpoint": str(tmp_path / "checkpoint")}
    for _ in range(2):
        driver = drivers("copy", **asked, sink={"stream": "out", "chunkRows": str(chance.choice([7, 50, 400]))})
        mark = length(redis_url) + chance.randrange(1, ROWS // 3)
        wait_until(lambda mark=mark: length(redis_url) >= mark, what=f"{mark} rows", timeout_s=120)
        driver.kill()
    partitions = {**SOURCE, "minPartitions": str(chance.choice([1, 3, 5])), "maxOffsetsPerTrigger": "2000"}
    last = {**asked, "source": partitions, "available_now": True}
    drivers("copy", **last, sink={"stream": "out", "chunkRows": str(chance.choice([3, 1000]))}).finish()
    assert balance(redis_url) == (0, 0), f"(lost, doubled), SEED={SEED} trial={trial}"


planted = pytest.mark.skipif(TRIALS < 5, reason="planted faults that take a minute: `make chaos` shows them")


@pytest.mark.at_length
@pytest.mark.parametrize(
    ("delivery", "doubled"), [("exactly_once", 0), pytest.param("at_least_once", 500, marks=planted)]
)
def test_a_driver_killed_between_the_sinks_write_and_sparks_commit(delivery, doubled, redis_url, drivers, tmp_path):
    """With delivery at least once, the same kill duplicates the batch, which shows that the kill and the count work."""
    fill(redis_url, 1500)
    asked = {"url": redis_url, "source": SOURCE, "checkpoint": str(tmp_path / "checkpoint")}
    asked["sink"] = {"stream": "out", "delivery": delivery}
    driver = drivers("dying", **asked)
    assert driver.process.wait(120) == -signal.SIGKILL
    assert length(redis_url) == 1000
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    drivers("copy", **asked, available_now=True).finish()
    assert balance(redis_url, 1500) == (0, doubled)


@pytest.mark.at_length
def test_two_drivers_on_one_checkpoint_duplicate_nothing(redis_url, drivers, tmp_path):
    fill(redis_url)
    asked = {"url": redis_url, "source": SOURCE, "checkpoint": str(tmp_path / "c"), "sink": {"stream": "out"}}
    rivals = [drivers("copy", **asked) for _ in range(2)]
    wait_until(lambda: length(redis_url) >= ROWS // 2, what="half of the rows", timeout_s=180)
    for rival in rivals:
        rival.kill()
    drivers("copy", **asked, available_now=True).finish()
    assert balance(redis_url) == (0, 0)


def test_redis_killed_and_loading_while_a_query_runs(drivers, tmp_path):
    chance = random.Random(SEED)
    print(f"SEED={SEED}")
    with LoadingRedis() as server:
        server.fill()
        fill(server.url)
        asked = {"url": server.url, "source": {**SOURCE, "maxOffsetsPerTrigger": "100"}, "sink": {"stream": "out"}}
        driver = drivers("copy", **asked, checkpoint=str(tmp_path / "c"), available_now=True)
        for _ in range(TRIALS):
            mark = length(server.url) + chance.randrange(1, ROWS // (2 * TRIALS))
            wait_until(lambda mark=mark: length(server.url) >= mark, what=f"{mark} rows", timeout_s=120)
            server.kill()
            server.restart_loading()  # driver and tasks get LOADING when they reconnect
            server.loaded()
        driver.finish()
        assert balance(server.url) == (0, 0), f"(lost, doubled), SEED={SEED}"


def with_fault(drivers: Any, url: str, fault: str, **sink: str) -> tuple[str, tuple[int, int]]:
    """The output of the driver, and the numbers of lost and duplicated rows."""
    print(f"SEED={SEED}")
    asked: dict[str, Any] = {"url": url, "rows": 20_000, "seed": SEED, "master": "local[2,8]"}
    asked["sink"] = {"stream": "out", "chunkRows": "90", **sink}
    if fault == "rivals":
        rival = drivers(fault, **asked, hangs=True)
        drivers(fault, **asked, hangs=False).finish()
        output = rival.finish()
    else:
        output = drivers(fault, **asked).finish()
    return output, balance(url, 20_000)


@pytest.mark.parametrize("fault", ["flaky", pytest.param("rivals", marks=pytest.mark.at_length), "worker_killed"])
def test_tasks_that_die_hang_or_are_repeated_add_each_row_once(fault: str, redis_url, drivers):
    output, result = with_fault(drivers, redis_url, fault, txnAppId="job", txnVersion="1")
    assert result == (0, 0), f"(lost, doubled), SEED={SEED}"
    if fault == "worker_killed":
        assert "killed 0" not in output


@planted
@pytest.mark.parametrize("fault", ["flaky", "rivals"])
def test_same_faults_duplicate_rows_without_a_marker(fault: str, redis_url, drivers):
    _, (lost, doubled) = with_fault(drivers, redis_url, fault, delivery="at_least_once")
    assert lost == 0
    assert doubled > 0
