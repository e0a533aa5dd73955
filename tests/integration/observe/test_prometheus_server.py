"""A real Prometheus scrapes ``millstream run``: every expression is answered, and alerts fire for their causes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from millstream import Message, Publisher, open_blocking_broker, open_broker
from millstream.assignment import Announcement, announce_stream
from millstream.cli.observe import metric_families
from millstream.observe.alerts import alert_rules
from millstream.observe.grafana import dashboard
from millstream.testing import RedisProcess, free_port, wait_until
from tests.support.prometheus import Prometheus, needs_prometheus

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.at_length,  # `make test` tests each rule with promtool, which needs no time to pass
    needs_prometheus,
    pytest.mark.timeout(300),
]

PANELS_OF_A_WORKER = {"ready", "worker_up", "worker_memory_bytes", "stream_length", "stream_group_lag"} | {
    *("messages_received_total", "messages_acked_total", "messages_buried_total"),
    *("server_memory_bytes", "survey_up"),
}


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server of its own, because a test stops it."""
    with RedisProcess() as server:
        yield server


@pytest.fixture
def service(own_redis: RedisProcess, tmp_path: Path) -> Iterator[tuple[psutil.Process, int]]:
    """The supervisor of two worker processes, and its metrics port."""
    shutil.copy(HERE / "alerts_worker.py", tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "millstream", "run", "alerts_worker:router", "--url", own_redis.url]
    with (tmp_path / "run.log").open("w") as log:
        options = ["--processes", "2", "--metrics-port", str(port), "--drain", "1s"]
        process = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=log, stderr=log, env=dict(os.environ))
    yield psutil.Process(process.pid), port
    for worker in psutil.Process(process.pid).children() if process.poll() is None else []:
        worker.kill()
    process.kill()
    process.wait(10)


@pytest.fixture
def prometheus(service: tuple[psutil.Process, int], tmp_path: Path) -> Iterator[Prometheus]:
    with Prometheus(tmp_path, service[1]) as server:
        yield server


def publish(url: str, *payloads: bytes) -> None:
    async def run() -> None:
        async with open_broker(url) as broker, Publisher(broker) as publisher:
            await publisher.publish("orders", *(Message(payload) for payload in payloads))

    asyncio.run(run())


def test_alerts_fire_for_their_causes(
    service: tuple[psutil.Process, int], prometheus: Prometheus, own_redis: RedisProcess
) -> None:
    supervisor, _ = service
    client = redis.Redis.from_url(own_redis.url)
    wait_until(lambda: len(prometheus.series("millstream_worker_up == 1")) == 2, timeout_s=60)
    assert not prometheus.firing() - {"MillstreamNotReady"}, "the workers may not be ready yet"

    publish(own_redis.url, b"an order", b"poison")
    prometheus.wait_for("DeadLetters")

    # Both workers hold as many messages as they may; the others wait, and a second group has no consumer.
    client.xgroup_create("orders", "audit", "0")
    publish(own_redis.url, *[b"hold"] * 8)
    publish(own_redis.url, *[b"an order"] * 200)
    prometheus.wait_for("NoConsumer", "MessageStuck")

    # A worker that dies while it holds messages: the other worker claims them.
    supervisor.children()[0].kill()
    prometheus.wait_for("ConsumerDied")
    publish(own_redis.url, *[b"an order"] * 200)
    prometheus.wait_for("LagGrows")

    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", str(int(used * 1.05)))
    prometheus.wait_for("MemoryNearLimit")
    client.config_set("maxmemory", "0")

    def kill_a_worker() -> bool:
        for worker in supervisor.children()[:1]:
            worker.kill()
        return prometheus.are_firing("WorkerRestarts")

    wait_until(kill_a_worker, what="a worker to be restarted too often", timeout_s=120)
    own_redis.stop()
    prometheus.wait_for("BrokerUnreachable", "NotReady")


def test_alert_fires_when_members_are_paused_for_longer_than_their_lease(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    with open_blocking_broker(own_redis.url) as broker:
        for number in range(8):
            announce_stream(broker, "ingest", Announcement(f"session{number}"))
    ports = [free_port(), free_port()]
    program = [sys.executable, str(HERE / "lease_member.py"), own_redis.url]
    members = [subprocess.Popen([*program, f"member{port}", str(port)]) for port in ports]
    try:
        with Prometheus(tmp_path, *ports) as prometheus:
            owned = "sum(millstream_assignment_owned_streams)"
            wait_until(lambda: any(s["value"][1] == "8" for s in prometheus.series(owned)), timeout_s=60)
            assert not prometheus.are_firing("LeaseFlapping")
            for _ in range(10):
                for member in members:
                    member.send_signal(signal.SIGSTOP)
                    time.sleep(2)
                    member.send_signal(signal.SIGCONT)
                    time.sleep(1)
                if prometheus.are_firing("LeaseFlapping"):
                    break
            prometheus.wait_for("LeaseFlapping")
    finally:
        for member in members:
            member.kill()
            member.wait(10)


def test_every_expression_is_answered(
    service: tuple[psutil.Process, int], prometheus: Prometheus, own_redis: RedisProcess
) -> None:
    publish(own_redis.url, *[b"an order"] * 20, b"poison")
    wait_until(lambda: prometheus.series("millstream_messages_buried_total > 0"), timeout_s=60)
    for rule in alert_rules()["groups"][0]["rules"]:
        prometheus.series(rule["expr"])
    panels = [panel for row in dashboard(metric_families())["panels"] for panel in (row.get("panels") or [row])]

    queries = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
    queries = [(title, text.replace("$__rate_interval", "1m").replace("$job", "shop")) for title, text in queries]

    def panels_without_data() -> set[str]:
        return PANELS_OF_A_WORKER - {title for title, expression in queries if prometheus.series(expression)}

    # A rate needs two scrapes. Panels of pipelines and assignments have no data here.
    wait_until(lambda: not panels_without_data(), what="the panels to have data", timeout_s=60)
