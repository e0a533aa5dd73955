"""Two processes and one checkpoint: the second start is refused, and a standby takes over from a killed or paused one.

A paused process that continues writes nothing, and ends with an error and exit code 8."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from millstream.testing import RedisProcess, wait_until
from support.pipeline_process import PipelineProcess

TRIALS = int(os.environ.get("TRIALS", "1"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
LEASE_S = 3
TAKEN = 8

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600 + 120 * TRIALS)]

# Every event is delivered to `one`, to a stream of its table, and to an optional sink through its queue on disk. Events
# of tables without a status have no stream in `partial`, and become dead letters.
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: guarded}
spec:
  source: {type: generator, config: {rows: 10000000, rate: 200}}
  sinks:
    - {type: redis, config: {id: one, uri: "URL", stream: one}}
    - {type: redis, config: {id: routed, uri: "URL", stream: "routed.${source.table}"}}
    - {type: redis, config: {id: optional, uri: "URL", stream: optional, required: false}}
    - {type: redis, config: {id: partial, uri: "URL", stream: "partial.${after.status}"}}
  dlq: {max_entries: 100000}
  batch: {max_events: 100}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""
DEAD_LETTERS = "default:guarded.dlq"


class Pair:
    """The process that runs the pipeline, and its standby."""

    def __init__(self, directory: Path, url: str) -> None:
        self.checkpoint = directory / "checkpoint"
        self._text = SPEC.replace("URL", url).replace("CHECKPOINT", str(self.checkpoint))
        self._directory = directory
        self._started: list[PipelineProcess] = []

    def start(self, *options: str) -> PipelineProcess:
        # A spec of its own for each process, because the log has the spec's name.
        spec = self._directory / f"guarded-{len(self._started)}.yaml"
        spec.write_text(self._text)
        self._started.append(PipelineProcess(spec, "--lease", str(LEASE_S), *options))
        return self._started[-1]

    def start_standby(self) -> PipelineProcess:
        standby = self.start("--standby")
        wait_until(lambda: "standby: process" in standby.last_words(), what="the standby waits", timeout_s=300)
        standby.must_run()
        return standby

    def end(self) -> None:
        for process in self._started:
            if not process.ended():
                os.killpg(process.process.pid, signal.SIGCONT)
            process.kill()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Pair, redis.Redis]]:
    with RedisProcess() as server:
        processes = Pair(tmp_path, server.url)
        try:
            yield processes, redis.Redis(port=server.port)
        finally:
            processes.end()


def log_files(checkpoint: Path) -> dict[str, tuple[bytes, int, int]]:
    """The content, the modification time and the inode of what the checkpoint keeps of finished batches."""
    result = {}
    for kind in ("offsets", "commits"):
        for path in (checkpoint / "spark" / kind).iterdir():
            if path.name.isdigit():
                facts = path.stat()
                result[f"{kind}/{path.name}"] = (path.read_bytes(), facts.st_mtime_ns, facts.st_ino)
    return result


def numbers(client: redis.Redis, stream: str) -> list[int]:
    return [int(fields[b"id"].rpartition(b":")[2]) for _, fields in client.xrange(stream)]


def numbers_of_all(client: redis.Redis, pattern: str) -> list[int]:
    streams = [key.decode() for key in client.scan_iter(pattern, _type="stream")]
    return [number for stream in streams for number in numbers(client, stream)]


def test_standby_takes_over_and_the_paused_process_writes_nothing(pair: tuple[Pair, redis.Redis]) -> None:
    processes, client = pair
    dice = random.Random(SEED)
    print(f"\nSEED={SEED} TRIALS={TRIALS}")

    def written() -> int:
        return int(client.xlen("one"))

    def await_rows(count: int, by: PipelineProcess) -> None:
        wait_until(lambda: by.ended() or written() >= count, what=f"{count} rows", timeout_s=300)
        by.must_run()

    active = processes.start()
    await_rows(100, active)
    second = processes.start()
    assert second.process.wait(120) == TAKEN
    assert f"process {active.process.pid} on host" in second.last_words()
    outcomes: Counter[str] = Counter()
    standby = processes.start_standby()
    for trial in range(TRIALS):
        time.sleep(dice.uniform(0, 1.5))  # the moment of the kill is random
        paused = trial % 2 == 0
        if paused:
            os.killpg(active.process.pid, signal.SIGSTOP)
        else:
            active.kill()
        held = written()
        await_rows(held + 100, standby)
        if paused:
            before = log_files(processes.checkpoint)
            os.killpg(active.process.pid, signal.SIGCONT)
            assert active.process.wait(60) == TAKEN, active.last_words()
            assert "LeaseLost" in active.last_words()
            await_rows(written() + 100, standby)
            after = log_files(processes.checkpoint)
            assert {name: after[name] for name in before if name in after} == {
                name: facts for name, facts in before.items() if name in after
            }
        outcomes["paused" if paused else "killed"] += 1
        standby.must_run()
        active = standby
        if trial + 1 < TRIALS:
            standby = processes.start_standby()
    active.process.send_signal(signal.SIGTERM)
    assert active.process.wait(120) == 0, active.last_words()
    check_ledger(client, outcomes)


def check_ledger(client: redis.Redis, outcomes: Counter[str]) -> None:
    result: dict[str, Any] = {"one": numbers(client, "one")}
    result["routed"] = numbers_of_all(client, "routed.*")
    result["optional"] = numbers(client, "optional")
    result["partial and dead letters"] = numbers_of_all(client, "partial.*") + numbers(client, DEAD_LETTERS)
    rows = len(result["one"])
    for name, delivered in result.items():
        lost, doubled = rows - len(set(delivered)), len(delivered) - len(set(delivered))
        if name == "optional":  # its last batches may still wait on disk
            lost = max(delivered) + 1 - len(set(delivered))
        print(f"LEDGER {dict(outcomes)} {name} rows={len(delivered)} lost={lost} duplicates={doubled}")
        assert (lost, doubled) == (0, 0), name
    assert sorted(result["one"]) == [*range(rows)]
