"""Delta and Kafka for real, on Spark 4.2, for which both are published: exactly once into Delta under kills; Kafka as a
source whose events keep their ids, and as a sink.

They start many drivers, and take minutes: `make chaos` runs them. Where Maven is not there, or cannot fetch the
artefacts, they are skipped and say so.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from published_jars import CONNECTOR, DELTA, KAFKA, jars
from running import entries

from millstream.testing import RedisProcess, free_port, wait_until

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_pipeline_processes import Command, commands  # noqa: F401  # pytest hands the fixture in by its name
from test_places import PATHS, spark_42, spark_42_variables

TRIALS = int(os.environ.get("TRIALS", "0"))
pytestmark = [
    pytest.mark.spark,
    pytest.mark.chaos,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not TRIALS, reason="they take minutes: `make chaos` runs them"),
]

ROWS = 120


def write_spec(where: Path, name: str, source: dict[str, Any], sink: dict[str, Any], conf: dict[str, str]) -> str:
    spec = {
        "source": source,
        "sinks": [sink],
        "dlq": {"enabled": False},
        "checkpoint": {"path": str(where / name)},
        "spark": {"master": "local[2]", "conf": conf},
    }
    whole = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": name}, "spec": spec}
    file = where / f"{name}.yaml"
    file.write_text(json.dumps(whole))
    return str(file)


def with_jars(result: list[Path], **conf: str) -> dict[str, str]:
    return {"spark.jars": ",".join(map(str, result)), **conf}


def in_42(commands: Any, *words: str) -> Command:  # noqa: F811
    python = spark_42()
    names = {"PYTHONPATH": PATHS, **spark_42_variables()}
    command: Command = commands("run", *words, "--http-port", "0", "-q", python=python, **names)
    return command


DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Delta reads its log with fifty tasks for each commit, which is a lot for a table of a few rows.
    "spark.databricks.delta.snapshotPartitions": "1",
}


def test_exactly_once_into_delta_under_kills(
    commands: Any,  # noqa: F811
    redis_server: RedisProcess,
    tmp_path: Path,
) -> None:
    spark_42()
    conf = with_jars(jars("delta", DELTA), **DELTA_CONF)
    client, table = redis.Redis(port=redis_server.port), tmp_path / "table"
    for n in range(ROWS):
        client.xadd("in", {"event": json.dumps({"n": n})})
    source = {"type": "redis", "config": {"uri": redis_server.url, "stream": "in"}}
    sink = {"type": "spark", "config": {"id": "delta", "format": "delta", "path": str(table)}}
    file = write_spec(tmp_path, "lake", source, sink, conf)
    text = json.loads(Path(file).read_text())
    text["spec"]["batch"] = {"max_events": ROWS // 4}
    Path(file).write_text(json.dumps(text))
    dice = random.Random(7)
    killed = 0
    while killed < TRIALS:
        command = in_42(commands, file, "--once")
        ended = partial(has_ended_or_committed, command, table, commits_of(table) + dice.randrange(1, 4))
        wait_until(ended, what="a few commits", timeout_s=240)
        assert command.process.poll() in (None, 0), command.log.read_text()[-3000:]
        if command.process.poll() == 0:
            break
        os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()
        killed += 1
    last = in_42(commands, file, "--once")
    assert last.wait(400) == 0, last.log.read_text()[-3000:]
    result = Counter(json.loads(row)["n"] for row in read_delta(table, conf))
    twice = sum(count > 1 for count in result.values())
    print(f"LEDGER delta rows={ROWS} kills={killed} found={sum(result.values())} twice={twice}")
    assert killed, "nothing was killed: the test shows nothing"
    assert result == Counter(range(ROWS))


def commits_of(table: Path) -> int:
    return len(list((table / "_delta_log").glob("*.json")))


def has_ended_or_committed(command: Command, table: Path, commits: int) -> bool:
    return command.process.poll() is not None or commits_of(table) >= commits


def read_delta(table: Path, conf: dict[str, str]) -> list[str]:
    code = f"""
import json
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
for name, value in {conf!r}.items():
    builder = builder.config(name, value)
rows = builder.getOrCreate().read.format("delta").load({str(table)!r}).collect()
print("ROWS" + json.dumps([row.after for row in rows]))
"""
    names = {**os.environ, **spark_42_variables()}
    done = subprocess.run([spark_42(), "-c", code], capture_output=True, text=True, timeout=300, check=False, env=names)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
    result: list[str] = json.loads(line.removeprefix("ROWS"))
    return result


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of one node, with its data in a directory of its own."""
    where = tmp_path_factory.mktemp("kafka")
    classpath = os.pathsep.join(map(str, jars("kafka", KAFKA, for_spark=False)))
    port, controller = free_port(), free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": where / "data",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "num.partitions": 2,
    }
    file = where / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    java = ["java", "-Xmx256m", "-cp", classpath]
    subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(file)], check=True, timeout=120
    )
    with (where / "log").open("w") as log:
        process = subprocess.Popen([*java, "kafka.Kafka", str(file)], stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port), what="Kafka", timeout_s=120)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_kafka_as_a_sink_and_as_a_source_whose_events_keep_their_ids(
    commands: Any,  # noqa: F811
    kafka: str,
    redis_server: RedisProcess,
    tmp_path: Path,
) -> None:
    spark_42()
    conf = with_jars(jars("connector", CONNECTOR))
    client = redis.Redis(port=redis_server.port)
    options = {"kafka.bootstrap.servers": kafka, "topic": "orders"}
    generated = {"type": "generator", "config": {"rows": ROWS, "start_ts_ms": 1_700_000_000_000}}
    into = {"type": "spark", "config": {"id": "topic", "format": "kafka", "options": options}}
    command = in_42(commands, write_spec(tmp_path, "into", generated, into, conf), "--once")
    assert command.wait(400) == 0, command.log.read_text()[-3000:]
    read = {"kafka.bootstrap.servers": kafka, "subscribe": "orders", "startingOffsets": "earliest"}
    source = {"type": "spark", "config": {"format": "kafka", "options": read}}
    sink = {"type": "redis", "config": {"id": "main", "uri": redis_server.url, "stream": "out"}}
    file = write_spec(tmp_path, "from", source, sink, conf)
    ids: list[list[str]] = []
    for _ in range(2):
        command = in_42(commands, file, "--once")
        assert command.wait(400) == 0, command.log.read_text()[-3000:]
        ids.append(sorted(entry["id"] for entry in entries(client)))
        # The state after a crash between the sink's write and Spark's commit.
        commits = tmp_path / "from" / "spark" / "commits"
        for path in (commits / "0", commits / ".0.crc"):
            path.unlink(missing_ok=True)
        time.sleep(0.01)
    result = [json.loads(entry["event"]) for entry in entries(client)]
    numbers = sorted(int(json.loads(entry["event"])["id"].rpartition(":")[2]) for entry in entries(client))
    print(f"LEDGER kafka rows={ROWS} found={len(result)} replays=1")
    assert ids[0] == ids[1], "a replay added something"
    assert len(set(ids[0])) == ROWS
    assert all(each.startswith("kafka:orders:") for each in ids[0]), ids[0][:3]
    assert {document["source"]["table"] for document in result} == {"customers", "orders", "payments"}
    assert len(numbers) == ROWS
