"""A pipeline is killed at random moments and started again: every row is in every sink, and none of them twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import redis

from millstream.testing import RedisProcess, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(900)]

TRIALS = int(os.environ.get("TRIALS", "2"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))
ROWS = 1500
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: crashing}
spec:
  source: {type: generator, config: {rows: ROWS, rate: 600}}
  processors: PROCESSORS
  sinks:
    - {type: redis, config: {id: one, uri: "URL", stream: one}}
    - {type: redis, config: {id: routed, uri: "URL", stream: "routed.${source.table}"}}
    - {type: redis, config: {id: optional, uri: "URL", stream: optional, required: false}}
  batch: {max_events: 150}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""
PLANS = {
    "in order": "[]",
    "shuffled": '[{type: sql, query: "SELECT id, key, op, `table`, after, before, ts_ms FROM events ORDER BY rand()"}]',
}


class Running:
    """``millstream pipeline run`` as a process group of its own: killing it takes its JVM and its workers along."""

    def __init__(self, spec: Path, *words: str) -> None:
        self._log = spec.with_suffix(".log").open("a+")
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(spec), "--http-port", "0", *words]
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, start_new_session=True, env=environment
        )

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended already
        self.process.wait()
        self._log.close()

    def finish(self, timeout_s: float) -> None:
        code = self.process.wait(timeout_s)
        self._log.seek(0)
        assert code == 0, self._log.read()[-3000:]
        self._log.close()


def balance(client: redis.Redis, streams: list[str]) -> tuple[int, int]:
    """Rows that are missing, and rows that are there more than once."""
    ids = [fields[b"id"] for stream in streams for _, fields in client.xrange(stream)]
    times = Counter(ids)
    wanted = {b"generator-42:%d" % n for n in range(ROWS)}
    return len(wanted - set(times)), sum(times.values()) - len(times)


@pytest.mark.parametrize("kind", PLANS)
def test_killed_at_random_moments(kind: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED}-{kind}")
    print(f"\nSEED={SEED} TRIALS={TRIALS} {kind}")
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        spec = tmp_path / "crashing.yaml"
        text = SPEC.replace("ROWS", str(ROWS)).replace("URL", server.url).replace("PROCESSORS", PLANS[kind])
        spec.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))

        def length() -> int:
            return int(client.xlen("one"))

        for trial in range(TRIALS):
            held = length()
            running = Running(spec)
            try:
                wait_until(lambda held=held: length() > held or length() == ROWS, what="progress", timeout_s=120)
                time.sleep(dice.uniform(0, 1.5))  # the moment is what this test draws lots for
            finally:
                running.kill()
            print(f"killed {trial + 1} with {length()} of {ROWS} rows in the stream")
        # Whatever the clock says is due by now is drained; the rest comes as its time comes.
        while length() < ROWS or client.xlen("optional") < ROWS:
            Running(spec, "--once").finish(240)
        Running(spec, "--once").finish(240)
        for streams in (["one"], ["routed.orders", "routed.customers", "routed.payments"], ["optional"]):
            lost, doubled = balance(client, streams)
            print(f"LEDGER {kind} {'+'.join(streams)} produced={ROWS} lost={lost} duplicates={doubled}")
            assert (lost, doubled) == (0, 0)


def test_the_ledger_sees_what_it_is_for(tmp_path: Path) -> None:
    """A planted fault: rows written twice and rows left out are found."""
    with RedisProcess() as server:
        client = redis.Redis(port=server.port)
        for n in (*range(ROWS - 2), 7):
            client.xadd("one", {"id": f"generator-42:{n}"})
        assert balance(client, ["one"]) == (2, 1)
