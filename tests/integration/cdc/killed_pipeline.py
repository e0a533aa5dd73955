"""Whole pipelines with random writers, while every process is killed; the entries in Redis are checked strictly.

One process runs a pipeline for each database, so that one start of Spark, which is most of a run's time, serves both.
The executors are processes of their own (``local-cluster``). Every run kills each of pipeline, executor, databases and
Redis at least once, in an order and at moments that are drawn by lot.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyspark
import redis
from following import Follower
from ledger_run import Database, rows_of, tables, writers
from random_writers import MariadbWriters, Writers
from strict_ledger import StrictLedger

from millstream.pipelines import Checkpoint
from millstream.testing import MariadbProcess, PostgresProcess, RedisProcess, wait_until
from support.pipeline_process import PipelineProcess

KINDS = ("pipeline", "executor", "redis")
"""What is killed besides the databases, which are named by themselves."""
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: NAME}
spec:
  source: SOURCE
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: NAME}}
  batch: {max_events: 1000}
  checkpoint: {path: CHECKPOINT}
  spark:
    master: "local-cluster[1,2,1024]"
    conf: {spark.executor.extraJavaOptions: "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""
SOURCES = {
    "postgres": '{type: postgres, config: {dsn: "DSN", tables: ["public.*"], create: true, chunk_rows: 20}}',
    "mariadb": '{type: mariadb, config: {dsn: "DSN", tables: ["*"], chunk_rows: 20}}',
}
LEAD = 100
"""How many transactions the writers may be ahead, from one kill to the next, before they go on slowly: at a kill they
write, and what is left for the end is not more on a busy machine."""
PAIR_KEY = {"postgres": ("a", "b"), "mariadb": ("b", "a")}


class Running(PipelineProcess):
    """``planted`` is Python that runs first in each of its Python processes, driver and workers: a fault."""

    def __init__(self, spec: Path, *arguments: str, planted: str = "") -> None:
        directory = spec.parent / "python"
        directory.mkdir(exist_ok=True)
        (directory / "sitecustomize.py").write_text(planted)
        home = str(_spark_home(spec.parent))
        super().__init__(spec, *arguments, modules=directory, PYSPARK_PYTHON=sys.executable, SPARK_HOME=home)

    def kill_executor(self) -> None:
        """Waits for an executor if Spark is about to start one."""
        wait_until(self._executors, what="an executor", timeout_s=200)
        executors = self._executors()
        for pid in executors:
            os.kill(pid, signal.SIGKILL)
        assert executors, "it ended by itself"

    def _executors(self) -> list[int]:
        executors = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                command = (directory / "cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command and os.getsid(int(directory.name)) == self.process.pid:
                    executors.append(int(directory.name))
            except OSError:
                pass  # it has already ended
        return executors


def _spark_home(scratch: Path) -> Path:
    """A worker of a cluster writes into its Spark directory, so it gets a directory of links."""
    home, installed = scratch / "spark", Path(pyspark.__file__).parent
    if not home.exists():
        home.mkdir()
        for part in installed.iterdir():
            (home / part.name).symlink_to(part)
    return home


class Followed:
    """One of the databases, its tables, and the pipeline that follows it; ``source`` is ``postgres`` or ``mariadb``."""

    def __init__(self, source: str, scratch: Path, seed: int) -> None:
        self.source, self._scratch, self._seed = source, scratch, seed
        self.server: PostgresProcess | MariadbProcess = (
            PostgresProcess() if source == "postgres" else MariadbProcess({"server-id": "7"})
        )
        self.checkpoint = scratch / f"checkpoint-{source}"
        self.ledger = StrictLedger()
        self.database: Database
        self.writers: Writers | MariadbWriters

    def begin(self, redis_url: str) -> Path:
        """Adds rows for a snapshot, and then starts writers. Returns the pipeline's file."""
        self.database = self.server.fresh_database()
        self.database.execute(*tables(self.database))
        before = writers(self.database, self._seed, allowed=60).start()
        wait_until(before.spent, what="rows for the snapshot", timeout_s=60)
        before.stop()
        spec = self._scratch / f"{self.source}.yaml"
        source = SOURCES[self.source].replace("DSN", self.database.dsn)
        text = SPEC.replace("SOURCE", source).replace("URL", redis_url).replace("NAME", self.source)
        spec.write_text(text.replace("CHECKPOINT", str(self.checkpoint)))
        self.writers = writers(self.database, self._seed + 1, pause_s=0.1, allowed=LEAD).start()
        return spec

    def kill(self) -> None:
        with MariadbWriters.truncating:  # a MariaDB that dies during a TRUNCATE may not have logged it
            self.server.kill()
        self.server.start()

    def write_the_last(self) -> int:
        """Writes a last change and returns the log's position right before it: all earlier commits end there or
        before."""
        position = Follower(self.database, self._scratch).reader._database.log_end()
        self.database.execute("INSERT INTO words VALUES ('last', 1, NULL)")
        return position

    def finished_behind(self, position: int) -> bool:
        """Whether a batch that ends after the position is committed."""
        checkpoint = Checkpoint(self.checkpoint)
        last = checkpoint.last_committed()
        ends = None if last is None else checkpoint.ends(last)
        return ends is not None and any(end["position"] > position for end in ends)

    def read_strictly(self, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> StrictLedger:
        events = [_event(fields) for _, fields in entries]
        # A stream shows transactions, not batches: each transaction is a run of adjacent entries, and occurs once.
        for _, command_pipeline in itertools.groupby(events, key=lambda event: event["position"]["lsn"]):
            self.ledger.apply(command_pipeline)
        self.ledger.compare("words", rows_of(self.database, "words"), ("word",))
        self.ledger.compare("pairs", rows_of(self.database, "pairs"), PAIR_KEY[self.source])
        return self.ledger


class KilledPipeline:
    """One run. ``kinds`` are what is killed, in any order: of ``KINDS``, and databases by their names.

    ``planted`` is a fault for all processes of the pipeline. One that ends it is waited for as the kind ``itself``.
    """

    def __init__(self, sources: Sequence[str], scratch: Path, seed: str, *, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self.planted = ""
        self._chance = random.Random(f"{seed}-{sources}")
        self.followed = {source: Followed(source, scratch, self._chance.randrange(10**6)) for source in sources}
        self._redis = RedisProcess(["--appendonly", "yes", "--appendfsync", "always"])
        self._client = redis.Redis(port=self._redis.port)
        self._specs: list[Path] = []
        self.kills: Counter[str] = Counter()

    def segments(self, source: str) -> Path:
        return self.followed[source].checkpoint / "segments"

    def run(self) -> dict[str, StrictLedger]:
        """Prints the ledgers, and returns them."""
        with contextlib.ExitStack() as servers:
            servers.enter_context(self._redis)
            for each in self.followed.values():
                servers.enter_context(each.server)
                self._specs.append(each.begin(self._redis.url))
            running = self._start()
            try:
                for kind in self._chance.sample(self._kinds, len(self._kinds)):
                    if kind != "itself":
                        self._await_progress(running)
                        time.sleep(2 * self._chance.random())  # the moment of the kill is random
                    running = self._kill(kind, running)
                self._await_progress(running)
                self._await_the_end(running)
            finally:
                for each in self.followed.values():
                    each.writers.stop()
                running.kill()
            return {source: self._read_strictly(each) for source, each in self.followed.items()}

    def _start(self) -> Running:
        return Running(self._specs[0], *map(str, self._specs[1:]), planted=self.planted)

    def _await_progress(self, running: Running) -> None:
        """Waits for progress of every database; then the writers continue."""
        least = {source: self._length(source) + 60 for source in self.followed}
        self._await(running, lambda: all(self._length(source) >= timeout_s for source, timeout_s in least.items()))
        for each in self.followed.values():
            each.writers.go_on(LEAD)

    def _await_the_end(self, running: Running) -> None:
        for each in self.followed.values():
            each.writers.stop()
        last = {source: each.write_the_last() for source, each in self.followed.items()}
        self._await(running, lambda: all(self.followed[source].finished_behind(end) for source, end in last.items()))

    def _await(self, running: Running, reached: Callable[[], bool], *, ends: bool = False) -> None:
        """``ends``: the pipeline may."""

        def there() -> bool:
            time.sleep(0.2)  # polling more often would take CPU time from the pipeline
            if not ends:
                running.must_run()
            for each in self.followed.values():
                if each.writers.spent():
                    each.writers.go_on(2)  # a snapshot that was read late includes all that they wrote
            return reached()

        try:
            wait_until(there, what="progress", timeout_s=300)
        except TimeoutError as error:
            raise AssertionError(f"no progress; the pipeline said: {running.last_words()}") from error

    def _length(self, source: str) -> int:
        return int(self._client.xlen(source))

    def _kill(self, kind: str, running: Running) -> Running:
        if kind == "executor":
            running.kill_executor()
        elif kind in ("pipeline", "itself"):
            if kind == "itself":
                self._await(running, running.ended, ends=True)
            running.kill()
            for source in self.followed:
                for path in self.segments(source).glob("0*.seg"):
                    path.unlink()  # the read-ahead log can be read from the database again
            running = self._start()
        elif kind == "redis":
            self._redis.kill()
            self._redis.start()
            self._client.close()  # the next query opens a connection to the restarted server
        else:
            self.followed[kind].kill()
        self.kills[kind] += 1
        return running

    def _read_strictly(self, followed: Followed) -> StrictLedger:
        ledger = followed.read_strictly(self._client.xrange(followed.source))
        events = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        print(
            f"LEDGER {followed.source}: {sum(ledger.ids.values())} ids, {len(ledger.transactions)} transactions, "
            f"killed: {events}; {len(ledger.verdict())} complaints"
        )
        return ledger


def _event(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """Converts an entry to the ledger's form."""
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
