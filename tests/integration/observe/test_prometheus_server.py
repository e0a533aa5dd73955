"""A real Prometheus scrapes ``millstream run``: every expression is answered, and alerts fire for their causes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest
import redis
import yaml

from millstream import Message, Publisher, open_broker
from millstream.cli.observe import metric_families
from millstream.observe.alerts import alert_rules
from millstream.observe.grafana import dashboard
from millstream.testing import RedisProcess, free_port, wait_until

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.at_length,  # `make test` tests each rule with promtool, which needs no time to pass
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
    pytest.mark.timeout(300),
]

PANELS_OF_A_WORKER = {"ready", "worker_up", "worker_memory_bytes", "stream_length", "stream_group_lag"} | {
    *("messages_received_total", "messages_acked_total", "messages_buried_total"),
    *("server_memory_bytes", "survey_up"),
}


def fast_rules() -> dict[str, Any]:
    """The exported rules with seconds in place of minutes, so that a test can wait for them."""
    rules = alert_rules()
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "0s"
        rule["expr"] = re.sub(r"\[\d+[mh]\]", "[20s]", rule["expr"])
        rule["expr"] = re.sub(r"offset \d+[mh]", "offset 20s", rule["expr"])
        rule["expr"] = rule["expr"].replace("oldest_pending_seconds) > 600", "oldest_pending_seconds) > 2")
    return rules


class Prometheus:
    def __init__(self, directory: Path, target_port: int) -> None:
        self.port = free_port()
        (directory / "rules.yml").write_text(yaml.safe_dump(fast_rules()))
        scrape = {"job_name": "shop", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        intervals = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        config = {"global": intervals, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        options = [
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with (directory / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)

    def get(self, path: str, **parameters: str) -> Any:
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as response:
            reply = json.load(response)
        assert reply["status"] == "success", reply
        return reply["data"]

    def is_scraping(self) -> bool:
        try:
            return any(target["health"] == "up" for target in self.get("targets")["activeTargets"])
        except OSError:
            return False

    def series(self, expression: str) -> list[dict[str, Any]]:
        return self.get("query", query=expression)["result"]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def wait_for(self, *alerts: str) -> None:
        names = {f"Millstream{alert}" for alert in alerts}
        wait_until(lambda: names <= self.firing(), what=f"{names} to fire", timeout_s=60)


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
    server = Prometheus(tmp_path, service[1])
    wait_until(server.is_scraping, timeout_s=60)
    yield server
    server.process.kill()
    server.process.wait(10)


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
        return "MillstreamWorkerRestarts" in prometheus.firing()

    wait_until(kill_a_worker, what="a worker to be restarted too often", timeout_s=120)
    own_redis.stop()
    prometheus.wait_for("BrokerUnreachable", "NotReady")


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
