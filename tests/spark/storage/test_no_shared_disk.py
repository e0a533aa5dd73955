"""A pipeline on a standalone cluster whose hosts share nothing but a store: kills, restarts, and the ledger."""

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

from millstream.testing import RedisProcess, wait_until
from support.hadoop_stores import HdfsStore, S3Store
from support.isolated_hosts import IsolatedCluster, IsolatedHost, require_namespaces

TRIALS = int(os.environ.get("TRIALS", "1"))
NUMBERS = 15 + 15 * TRIALS
"""For each ``more``."""
START_MS = 1_700_000_000_000
EXECUTOR = "CoarseGrainedExecutorBackend"
OUTAGE_S = 5
"""Long enough that a batch begins during the outage."""
DURABLE = ["--appendonly", "yes", "--appendfsync", "always"]

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


def spec(cluster: IsolatedCluster, url: str, optional_url: str, store: HdfsStore | S3Store) -> dict[str, Any]:
    optional = {"id": "optional", "uri": optional_url, "stream": "out", "required": False, "connect_timeout": "500ms"}
    return {
        "apiVersion": "millstream/v1",
        "kind": "Pipeline",
        "metadata": {"name": "isolated"},
        "spec": {
            "source": {"type": "redis", "config": {"uri": url, "stream": "in"}},
            "processors": [{"type": "deduplicate", "keys": ["row.n"], "watermark": "1 day"}],
            "sinks": [
                {"type": "redis", "config": {"id": "main", "uri": url, "stream": "out"}},
                {"type": "redis", "config": optional},
            ],
            "batch": {"max_events": 60},
            "retry": {"deadline": "5m"},
            "checkpoint": {"path": store.location},
            "spark": {"master": cluster.url, "conf": cluster.settings | store.settings},
        },
    }


def send(client: redis.Redis, first: int, last: int) -> None:
    """Every number twice: the second one is dropped by the state, which must survive the kills."""
    for number in (*range(first, last), *range(first, last)):
        document = {"op": "c", "ts_ms": START_MS + 1000 * number, "after": {"n": number}}
        client.xadd("in", {"event": json.dumps(document)})


def numbers(client: redis.Redis) -> Counter[int]:
    return Counter(json.loads(fields[b"event"])["after"]["n"] for _, fields in client.xrange("out"))


class Driver:
    """``millstream pipeline run`` on a host of its own, with its spec on that host's disk."""

    def __init__(self, cluster: IsolatedCluster, document: dict[str, Any]) -> None:
        self._cluster = cluster
        self._spec = json.dumps(document)
        self._host: IsolatedHost | None = None

    def start(self, *words: str) -> IsolatedHost:
        script = 'printf %s "$SPEC" > spec.yaml && exec "$@"'
        command = [sys.executable, "-m", "millstream", "pipeline", "run", "spec.yaml", "--http-port", "0", *words]
        self._host = self._cluster.host("driver", "sh", "-c", script, "sh", *command, SPEC=self._spec)
        return self._host

    def kill(self) -> None:
        if self._host is not None:
            self._host.kill()


def test_nothing_is_lost_or_written_twice_when_hosts_share_only_a_store(
    store: HdfsStore | S3Store, cluster: IsolatedCluster
) -> None:
    with RedisProcess(DURABLE) as server, RedisProcess() as optional:
        client = redis.Redis(port=server.port)
        late = redis.Redis(port=optional.port)
        optional.kill()
        driver = Driver(cluster, spec(cluster, server.url, optional.url, store))
        sent = 0

        def more() -> None:
            nonlocal sent
            send(client, sent, sent + NUMBERS)
            sent += NUMBERS

        def written(count: int) -> None:
            wait_until(lambda: len(numbers(client)) >= count, what=f"{count} numbers in the sink", timeout_s=240)

        def kill_executor() -> None:
            assert cluster.workers[0].kill_children(EXECUTOR) >= 1

        def fail_store() -> None:
            store.fail()
            time.sleep(OUTAGE_S)

        def fail_driver_and_store() -> None:
            driver.kill()
            store.fail()

        def start_before_the_store() -> None:
            driver.start()
            time.sleep(OUTAGE_S)
            store.recover()

        faults: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("executor", kill_executor, lambda: None),
            ("store", fail_store, store.recover),
            ("redis", server.kill, server.start),
            ("worker", lambda: cluster.kill_worker(1), lambda: cluster.restart_worker(1)),
            ("driver", driver.kill, driver.start),
            ("driver and store", fail_driver_and_store, start_before_the_store),
        ]
        killed: Counter[str] = Counter()

        try:
            more()
            driver.start()
            written(sent)
            for _ in range(TRIALS):
                for name, fail, recover in faults:
                    more()
                    fail()
                    if name != "redis":
                        more()
                    recover()
                    written(sent)
                    killed[name] += 1
            optional.start()
            wait_until(lambda: len(numbers(late)) == sent, what="the optional sink to catch up", timeout_s=240)
            driver.kill()
            assert driver.start("--once").process.wait(300) == 0
        finally:
            driver.kill()
        for name, ledger in (("main", numbers(client)), ("optional", numbers(late))):
            lost, doubled = sent - len(ledger), ledger.total() - len(ledger)
            print(f"LEDGER {store.name} kills={dict(killed)} {name} produced={sent} lost={lost} duplicates={doubled}")
            assert (lost, doubled) == (0, 0)
        assert list(cluster.private.iterdir()) == [], "nothing was written to a shared disk"
