"""Database to Redis on a standalone cluster whose hosts share only a store: kills, restarts, and a strict ledger."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from millstream.testing import MariadbDatabase, PostgresDatabase, RedisProcess, wait_until
from support.hadoop_stores import HdfsStore, S3Store
from support.isolated_hosts import IsolatedCluster, IsolatedHost, require_namespaces

TRIALS = int(os.environ.get("TRIALS", "1"))
ROWS = 300
EXECUTOR = "CoarseGrainedExecutorBackend"
OUTAGE_S = 5
"""Long enough that a batch begins during the outage."""
DURABLE = ["--appendonly", "yes", "--appendfsync", "always"]
Database = PostgresDatabase | MariadbDatabase

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.at_length, pytest.mark.timeout(600 + 600 * TRIALS)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[IsolatedCluster]:
    require_namespaces()
    (tmp_path / "cluster").mkdir()
    running = IsolatedCluster(tmp_path / "cluster")
    yield running
    running.close()


@pytest.fixture(params=[HdfsStore, S3Store], ids=["hdfs", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HdfsStore | S3Store]:
    running: HdfsStore | S3Store = request.param(tmp_path)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(params=["postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> Database:
    server: Database = request.getfixturevalue(request.param)
    return server


def _spec(cluster: IsolatedCluster, store: HdfsStore | S3Store, database: Database, url: str) -> dict[str, Any]:
    postgres = isinstance(database, PostgresDatabase)
    source: dict[str, Any] = {"dsn": database.dsn, "tables": ["items"], "chunk_rows": 40}
    source |= {"create": True} if postgres else {}
    return {
        "apiVersion": "millstream/v1",
        "kind": "Pipeline",
        "metadata": {"name": "isolated"},
        "spec": {
            "source": {"type": "postgres" if postgres else "mariadb", "config": source},
            "sinks": [{"type": "redis", "config": {"id": "main", "uri": url, "stream": "out"}}],
            "batch": {"max_events": 60},
            "retry": {"deadline": "5m"},
            "checkpoint": {"path": store.location},
            "spark": {"master": cluster.url, "conf": cluster.settings | store.settings},
        },
    }


class Driver:
    """``millstream pipeline run`` on a host with a private disk, which a restart does not preserve."""

    def __init__(self, cluster: IsolatedCluster, spec: dict[str, Any]) -> None:
        self._cluster = cluster
        self._spec = json.dumps(spec)
        self._host: IsolatedHost | None = None

    def start(self, *arguments: str) -> IsolatedHost:
        script = 'printf %s "$SPEC" > spec.yaml && exec "$@"'
        command = [sys.executable, "-m", "millstream", "pipeline", "run", "spec.yaml", "--http-port", "0", *arguments]
        self._host = self._cluster.host("driver", "sh", "-c", script, "sh", *command, SPEC=self._spec)
        return self._host

    def kill(self) -> None:
        if self._host is not None:
            self._host.kill()


class Ledger:
    """Applies the entries of the stream: each update must find the version before it."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(fields[b"event"]) for _, fields in self._client.xrange("out")]

    def faults(self, table: dict[int, int]) -> tuple[int, int, int]:
        """Numbers of rows that differ from the table, of repeated events, and of events out of order."""
        events = self.events()
        ids = Counter(event["id"] for event in events)
        state: dict[int, int] = {}
        disordered = 0
        for event in events:
            row = event["after"]
            expected = 0 if event["op"] in "rc" else state.get(row["id"], -2) + 1
            disordered += event["op"] == "u" and row["version"] != expected
            state[row["id"]] = row["version"]
        differing = sum(table.get(key) != state.get(key) for key in table.keys() | state.keys())
        return differing, ids.total() - len(ids), disordered


def test_database_changes_need_no_shared_disk(
    cluster: IsolatedCluster, store: HdfsStore | S3Store, database: Database
) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, version int, note varchar(100))")
    values = ", ".join(f"({number}, 0, 'item {number}')" for number in range(ROWS))
    database.execute(f"INSERT INTO items VALUES {values}")
    with RedisProcess(DURABLE) as server:
        client = redis.Redis(port=server.port)
        ledger = Ledger(client)
        driver = Driver(cluster, _spec(cluster, store, database, server.url))
        updates = 0

        def update() -> None:
            nonlocal updates
            updates += 1
            database.execute(f"UPDATE items SET version = version + 1 WHERE id % 3 = {updates % 3}")
            database.execute(f"INSERT INTO items VALUES ({ROWS + updates}, 0, 'new')")

        def written() -> None:
            new = ROWS + updates
            wait_until(
                lambda: any(event["after"]["id"] == new for event in ledger.events()),
                what=f"row {new} in the stream",
                timeout_s=240,
            )

        def kill_executor() -> None:
            assert cluster.workers[0].kill_children(EXECUTOR) >= 1

        def fail_store() -> None:
            store.fail()
            update()
            time.sleep(OUTAGE_S)

        faults: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("executor", kill_executor, lambda: None),
            ("store", fail_store, store.recover),
            ("redis", server.kill, server.start),
            ("worker", lambda: cluster.kill_worker(1), lambda: cluster.restart_worker(1)),
            ("database", database.server.kill, database.server.start),
            ("driver", driver.kill, driver.start),
        ]
        killed: Counter[str] = Counter()

        try:
            driver.start()
            wait_until(lambda: client.xlen("out") >= 60, what="the first chunks", timeout_s=240)
            in_snapshot = client.xlen("out") < ROWS
            driver.kill()
            killed["driver in the snapshot"] += in_snapshot
            update()
            driver.start()
            written()
            for _ in range(TRIALS):
                for name, fail, recover in faults:
                    update()
                    fail()
                    if name != "database":
                        update()
                    recover()
                    update()
                    written()
                    killed[name] += 1
            driver.kill()
            update()
            assert driver.start("--once").process.wait(300) == 0
        finally:
            driver.kill()
        table = {int(key): int(version) for key, version in database.execute("SELECT id, version FROM items")}
        differing, repeated, disordered = ledger.faults(table)
        name = f"{store.name} {type(database.server).__name__} kills={dict(killed)} events={client.xlen('out')}"
        print(f"LEDGER {name} differing={differing} repeated={repeated} disordered={disordered}")
        assert (differing, repeated, disordered) == (0, 0, 0)
        assert list(cluster.private.iterdir()) == [], "nothing was written to a shared disk"
