"""A whole pipeline beside random writers, with everything killed around it; what reached Redis is read strictly.

The executors are processes of their own (``local-cluster``). Every run kills each of pipeline, executor, database and
Redis at least once, in an order and at moments that are drawn by lot.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyspark
import redis
from ledger_run import Database, rows_of, tables, writers
from random_writers import MariadbWriters
from strict_ledger import StrictLedger

from millstream.testing import MariadbProcess, PostgresProcess, RedisProcess, wait_until
from pipeline_process import PipelineProcess

KINDS = ("pipeline", "executor", "database", "redis")
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: killed}
spec:
  source: SOURCE
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: changes}}
  batch: {max_events: 1000}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local-cluster[1,2,1024]"}
"""
SOURCES = {
    "postgres": '{type: postgres, config: {dsn: "DSN", tables: ["public.*"], create: true, chunk_rows: 20}}',
    "mariadb": '{type: mariadb, config: {dsn: "DSN", tables: ["*"], chunk_rows: 20}}',
}
PAIR_KEY = {"postgres": ("a", "b"), "mariadb": ("b", "a")}


class Running(PipelineProcess):
    """``planted`` is Python that runs first in each of its Python processes, driver and workers: a fault."""

    def __init__(self, spec: Path, *words: str, planted: str = "") -> None:
        place = spec.parent / "python"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(planted)
        home = str(_spark_home(spec.parent))
        super().__init__(spec, *words, modules=place, PYSPARK_PYTHON=sys.executable, SPARK_HOME=home)

    def kill_executor(self) -> None:
        """Waits for one where Spark is about to start it."""
        wait_until(self._executors, what="an executor", timeout_s=200)
        for pid in self._executors():
            os.kill(pid, signal.SIGKILL)

    def _executors(self) -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                command = (place / "cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command and os.getsid(int(place.name)) == self.process.pid:
                    found.append(int(place.name))
            except OSError:
                pass  # it has ended meanwhile
        return found


def _spark_home(scratch: Path) -> Path:
    """A cluster's worker writes beside the Spark that it runs: so it gets one of its own, of links."""
    home, installed = scratch / "spark", Path(pyspark.__file__).parent
    if not home.exists():
        home.mkdir()
        for part in installed.iterdir():
            (home / part.name).symlink_to(part)
    return home


class KilledPipeline:
    """One run. ``source`` is ``postgres`` or ``mariadb``; ``kinds`` are what is killed, in any order.

    ``planted`` is a fault for all processes of the pipeline. One that ends it is waited for as the kind ``itself``.
    """

    def __init__(self, source: str, scratch: Path, seed: str, *, kinds: Sequence[str] = KINDS) -> None:
        self._source, self._scratch, self._kinds = source, scratch, kinds
        self.planted = ""
        self.segments = scratch / "checkpoint" / "segments"
        self._chance = random.Random(f"{seed}-{source}")
        self._seed = self._chance.randrange(10**6)
        self._server: PostgresProcess | MariadbProcess = (
            PostgresProcess() if source == "postgres" else MariadbProcess({"server-id": "7"})
        )
        self._redis = RedisProcess(["--appendonly", "yes", "--appendfsync", "always"])
        self._client = redis.Redis(port=self._redis.port)
        self.kills: Counter[str] = Counter()

    def run(self) -> StrictLedger:
        """Prints the ledger, and returns it."""
        with self._server, self._redis:
            database: Database = self._server.fresh_database()
            database.execute(*tables(database))
            before = writers(database, self._seed).start()
            wait_until(lambda: before.transactions >= 30, what="rows for the snapshot", timeout_s=60)
            before.stop()
            spec = self._scratch / "killed.yaml"
            source = SOURCES[self._source].replace("DSN", database.dsn)
            text = SPEC.replace("SOURCE", source).replace("URL", self._redis.url)
            spec.write_text(text.replace("CHECKPOINT", str(self._scratch / "checkpoint")))
            during = writers(database, self._seed + 1, pause_s=0.05).start()
            running = Running(spec, planted=self.planted)
            try:
                for kind in self._chance.sample(self._kinds, len(self._kinds)):
                    if kind != "itself":
                        self._await_progress(running)
                        time.sleep(2 * self._chance.random())  # the moment is what this run draws lots for
                    running = self._kill(kind, running, spec)
                self._await_progress(running)
            finally:
                during.stop()
                running.kill()
            Running(spec, "--once", planted=self.planted).finish(600)
            return self._read_strictly(database)

    def _await_progress(self, running: Running) -> None:
        least = self._length() + 60

        def further() -> bool:
            running.must_run()
            return self._length() >= least

        wait_until(further, what="progress", timeout_s=300)

    def _length(self) -> int:
        return int(self._client.xlen("changes"))

    def _kill(self, kind: str, running: Running, spec: Path) -> Running:
        self.kills[kind] += 1
        if kind == "executor":
            running.kill_executor()
        elif kind in ("pipeline", "itself"):
            if kind == "itself":
                wait_until(running.ended, what="the pipeline's end", timeout_s=300)
            running.kill()
            for path in self.segments.glob("0*.seg"):
                path.unlink()  # what was read ahead can be had from the database again
            return Running(spec, planted=self.planted)
        elif kind == "database":
            with MariadbWriters.truncating:  # a MariaDB that dies in a TRUNCATE may have told its log nothing of it
                self._server.kill()
            self._server.start()
        else:
            self._redis.kill()
            self._redis.start()
            self._client.close()  # the next question opens a connection to the server that runs now
        return running

    def _read_strictly(self, database: Database) -> StrictLedger:
        ledger = StrictLedger()
        events = [_event(fields) for _, fields in self._client.xrange("changes")]
        # Batches are not to be seen in a stream, transactions are: each is one run of entries, and comes once.
        for _, together in itertools.groupby(events, key=lambda event: event["position"]["lsn"]):
            ledger.apply(together)
        ledger.compare("words", rows_of(database, "words"), ("word",))
        ledger.compare("pairs", rows_of(database, "pairs"), PAIR_KEY[self._source])
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        print(
            f"LEDGER {self._source}: {sum(ledger.ids.values())} ids, {len(ledger.transactions)} transactions, "
            f"killed: {told}; {len(ledger.verdict())} complaints"
        )
        return ledger


def _event(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """As the ledger wants it."""
    event = json.loads(fields[b"event"])
    _, lsn, _ = event["id"].split(":")
    return {
        "id": event["id"],
        "op": event["op"],
        "table": event["source"]["table"],
        "key": fields.get(b"key", b"").decode() or None,
        "before": None if event["before"] is None else json.dumps(event["before"]),
        "after": None if event["after"] is None else json.dumps(event["after"]),
        "position": {"lsn": lsn, "transaction": ""},
    }
