"""Pipelines as operators run them: the command, its signals, its HTTP port, and a cluster of two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from running import numbers

from millstream.testing import RedisProcess, free_port, wait_until
from millstream.testing.servers import ServeProcess

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_places import PATHS, StandaloneCluster, cluster, spark_42, spark_42_variables  # noqa: F401  # the connector's own cluster, as a fixture

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: orders}
spec:
  source: {type: generator, config: GENERATOR}
  sinks:
    - type: redis
      config:
        id: orders-redis
        uri: ${REDIS_URI}
        stream: out
        required: true
  batch: {max_events: 100}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]", conf: CONF}
"""


class Command:
    def __init__(self, where: Path, *words: str, python: str = sys.executable, **environment: str) -> None:
        self.log = where / "command.log"
        path = os.pathsep.join(filter(None, sys.path))
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [python, "-m", "millstream", "pipeline", *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, **environment},
            )

    def wait(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had ended already
        self.process.wait()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Any]:
    started: list[Command] = []

    def start(*words: str, **environment: str) -> Command:
        started.append(Command(tmp_path, *words, **environment))
        return started[-1]

    yield start
    for command in started:
        command.end()


def spec(where: Path, generator: str = "{rows: 200}", conf: str = "{}") -> str:
    file = where / "orders.yaml"
    text = SPEC.replace("GENERATOR", generator).replace("CONF", conf)
    file.write_text(text.replace("CHECKPOINT", str(where / "checkpoint")))
    return str(file)


def test_metrics_http_control_and_sigterm(commands: Any, redis_server: RedisProcess, tmp_path: Path) -> None:
    client, port = redis.Redis(port=redis_server.port), free_port()
    file = spec(tmp_path, "{rows: 1000000, rate: 500}")
    command = commands("run", file, "--http-port", str(port), REDIS_URI=redis_server.url)
    site = f"http://127.0.0.1:{port}"
    wait_until(lambda: client.xlen("out") > 200, what="some batches", timeout_s=120)
    assert (
        httpx.get(f"{site}/health", timeout=60).status_code == httpx.get(f"{site}/ready", timeout=60).status_code == 200
    )
    [standing] = httpx.get(f"{site}/pipelines", timeout=60).json()
    assert (standing["name"], standing["state"], standing["sinks"]) == ("orders", "running", {"orders-redis": "ok"})
    metrics = httpx.get(f"{site}/metrics", timeout=60).text
    assert 'millstream_sink_events_total{pipeline="orders",sink="orders-redis"}' in metrics
    assert 'millstream_pipeline_status{pipeline="orders",state="running"} 1.0' in metrics
    assert httpx.post(f"{site}/pipelines/orders/pause", timeout=60).json()["state"] == "paused"
    held = client.xlen("out")
    assert client.xlen("out") == held
    # One more batch may be planned, but not begun: it is the next that resuming runs.
    done = [
        batch["committed_ms"] is not None
        for batch in httpx.get(f"{site}/pipelines/orders/checkpoints", timeout=60).json()
    ]
    assert done[:-1] == [True] * (len(done) - 1)
    assert httpx.get(f"{site}/pipelines/orders/dlq", timeout=60).json()["total"] == 0
    assert httpx.post(f"{site}/pipelines/orders/resume", timeout=60).json()["state"] == "running"
    wait_until(lambda: client.xlen("out") > held, what="more after the pause", timeout_s=90)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 0, command.log.read_text()[-2000:]
    result = sorted(numbers(client))
    assert result == list(range(len(result)))
    assert "orders: stopped" in command.log.read_text()
    # Looked at afterwards, from its checkpoint; then forgotten.
    status = commands("status", file, "-o", "json", REDIS_URI=redis_server.url)
    assert status.wait() == 0
    assert '"state": "not running"' in status.log.read_text()
    assert commands("reset", file, REDIS_URI=redis_server.url).wait() == 6
    assert commands("reset", file, "--yes", REDIS_URI=redis_server.url).wait() == 0
    assert not (tmp_path / "checkpoint").exists()


def test_a_bad_spec_is_refused_before_spark_starts(commands: Any, tmp_path: Path) -> None:
    command = commands("run", spec(tmp_path, "{rows: many}"))
    assert command.wait(90) == 1
    output = command.log.read_text()
    assert "2 problems in the spec" in output
    assert "REDIS_URI is not set" in output
    assert "Spark" not in output


@pytest.mark.at_length
def test_a_password_is_in_no_log_and_in_no_file(commands: Any, tmp_path: Path) -> None:
    with RedisProcess(["--requirepass", "s3cret-word"]) as server:
        uri = server.url.replace("://", "://:s3cret-word@")
        command = commands(
            "run", spec(tmp_path), "--once", "--http-port", "0", REDIS_URI=uri, MILLSTREAM_SPARK_LOG="INFO"
        )
        assert command.wait() == 0, command.log.read_text()[-2000:]
        client = redis.Redis(port=server.port, password="s3cret-word")
        assert sorted(numbers(client)) == list(range(200))
        assert "s3cret-word" not in command.log.read_text()
        stored = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
        assert stored
        assert not [path for path in stored if b"s3cret-word" in path.read_bytes()]


@pytest.mark.at_length
def test_millstream_serve_instead_of_redis(commands: Any, tmp_path: Path) -> None:
    """Source, sink, group and dead letters on ``millstream serve``; restarted, it adds nothing."""
    with ServeProcess() as server:
        client = redis.Redis(port=server.port)
        for number in range(200):
            client.xadd("in", {"event": json.dumps({"n": number}) if number else "no JSON"})
        source = 'source: {type: redis, config: {uri: "${REDIS_URI}", stream: in}}'
        file = Path(spec(tmp_path))
        file.write_text(file.read_text().replace("source: {type: generator, config: {rows: 200}}", source))
        for _ in range(2):
            command = commands("run", str(file), "--once", "--http-port", "0", REDIS_URI=server.url)
            assert command.wait() == 0, command.log.read_text()[-2000:]
        result = [json.loads(fields[b"event"])["after"]["n"] for _, fields in client.xrange("out")]
        assert sorted(result) == list(range(1, 200))
        assert client.xlen("default:orders.dlq") == 1
        [group] = client.xinfo_groups("in")
        assert (group["name"], group["lag"]) == (b"pipeline:default:orders", 0)


@pytest.mark.at_length
def test_spark_4_2_runs_pipelines(commands: Any, redis_server: RedisProcess, tmp_path: Path) -> None:
    python = spark_42()
    query = "SELECT id, op, `table`, ts_ms, version() AS spark FROM events"
    file = Path(spec(tmp_path))
    stages = [{"type": "mask", "fields": {"email": "hash"}}, {"type": "deduplicate"}, {"type": "sql", "query": query}]
    file.write_text(file.read_text().replace("  sinks:\n", f"  processors: {json.dumps(stages)}\n  sinks:\n"))
    names = {"PYTHONPATH": PATHS, **spark_42_variables()}
    words = ("run", str(file), "--once", "--http-port", "0")
    command = commands(*words, python=python, REDIS_URI=redis_server.url, **names)
    assert command.wait(200) == 0, command.log.read_text()[-2000:]
    client = redis.Redis(port=redis_server.port)
    assert sorted(numbers(client)) == list(range(200))
    versions = {json.loads(fields[b"event"])["after"]["spark"][:4] for _, fields in client.xrange("out")}
    assert versions == {"4.2."}


def test_the_same_pipeline_on_a_cluster_of_two_workers(
    commands: Any,
    cluster: StandaloneCluster,  # noqa: F811  # pytest hands the fixture in by its name
    redis_server: RedisProcess,
    tmp_path: Path,
) -> None:
    settings = {
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.cores.max": "2",
    }
    file = spec(tmp_path, "{rows: 500}", json.dumps(settings))
    words = ("run", file, "--once", "--http-port", "0", "--master", cluster.master)
    command = commands(*words, REDIS_URI=redis_server.url)
    assert command.wait(200) == 0, command.log.read_text()[-2000:]
    assert sorted(numbers(redis.Redis(port=redis_server.port))) == list(range(500))
