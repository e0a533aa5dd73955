"""The whole way, killed again and again: pipeline, database and Redis. The stream, read strictly, equals the tables."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from ledger_run import rows_of
from random_writers import TABLES, Writers
from strict_ledger import StrictLedger

from millstream.testing import PostgresProcess, RedisProcess, wait_until

TRIALS = int(os.environ.get("TRIALS", "1"))
SEED = int(os.environ.get("SEED", random.SystemRandom().randrange(10**6)))

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(600 + 300 * TRIALS)]

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: killed}
spec:
  source:
    type: postgres
    config: {dsn: "DSN", tables: ["public.*"], create: true, chunk_rows: 20, lanes: LANES}
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: changes}}
  batch: {max_events: 200}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""


class Running:
    """``millstream pipeline run`` as a process group of its own: killing it takes its JVM and its workers along."""

    def __init__(self, spec: Path, *words: str) -> None:
        self._log = spec.with_suffix(".log").open("a+")
        command = [sys.executable, "-m", "millstream", "pipeline", "run", str(spec), "--http-port", "0", *words]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended already
        self.process.wait()

    def finish(self, timeout_s: float) -> None:
        code = self.process.wait(timeout_s)
        self._log.seek(0)
        assert code == 0, self._log.read()[-4000:]


def length(server: RedisProcess) -> int:
    return int(redis.Redis(port=server.port).xlen("changes"))


@pytest.mark.parametrize("trial", range(TRIALS))
def test_the_stream_equals_the_tables_whatever_was_killed(tmp_path: Path, trial: int) -> None:
    print(f"SEED={SEED}")
    chance = random.Random(f"{SEED}-{trial}-pipeline")
    with PostgresProcess() as postgres, RedisProcess(["--appendonly", "yes", "--appendfsync", "always"]) as server:
        database = postgres.main
        database.execute(*TABLES)
        before = Writers(database, SEED + trial).start()
        time.sleep(1)
        before.stop()
        spec = tmp_path / "killed.yaml"
        text = SPEC.replace("DSN", database.dsn).replace("URL", server.url).replace("LANES", "1")
        spec.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))
        writers = Writers(database, SEED + trial + 1).start()
        running = Running(spec)
        try:
            for _ in range(4):
                seen = length(server)
                wait_until(lambda least=seen + 60: length(server) >= least, what="progress", timeout_s=200)
                time.sleep(2 * chance.random())
                what = chance.choice(["pipeline", "pipeline", "postgres", "redis"])
                print("killed:", what)
                if what == "pipeline":
                    running.kill()
                    running = Running(spec)
                elif what == "postgres":
                    postgres.kill()
                    postgres.start()
                else:
                    server.kill()
                    server.start()
        finally:
            writers.stop()
            running.kill()
        Running(spec, "--once").finish(200)
        client = redis.Redis(port=server.port)
        ledger = StrictLedger()
        for _, fields in client.xrange("changes"):
            event = json.loads(fields[b"event"])
            ledger.apply([_flat(event, fields)])
        ledger.compare("words", rows_of(database, "words"), ("word",))
        ledger.compare("pairs", rows_of(database, "pairs"), ("a", "b"))
        print(f"{sum(ledger.ids.values())} events, {writers.transactions} transactions")
        assert ledger.verdict() == []
        assert sum(ledger.ids.values()) > 200
        slot = database.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
        assert slot, "the slot is there, and stands where the last batch ended"


def _flat(event: dict, fields: dict) -> dict:
    """As the ledger wants it. Batches are not to be seen in a stream: each transaction stands for its own."""
    _, lsn, _ = event["id"].split(":")
    return {
        "id": event["id"],
        "op": event["op"],
        "table": event["source"]["table"],
        "key": fields.get(b"key", b"").decode() or None,
        "before": None if event["before"] is None else json.dumps(event["before"]),
        "after": None if event["after"] is None else json.dumps(event["after"]),
        "position": {"lsn": lsn, "transaction": event["id"]},
    }
