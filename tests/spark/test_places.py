"""The same application in each environment: spark-submit, Connect, declarative pipelines, a cluster, Spark 4.2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millstream import open_blocking_broker
from millstream.broker.blocking_broker import BlockingBroker
from millstream.testing import RedisProcess, free_port, wait_until
from millstream.testing.topologies import ClusterSetup
from millstream.wire.commands import Command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

APP = Path(__file__).with_name("spark_app.py")
SPECULATING_APP = Path(__file__).with_name("speculating_app.py")
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(path for path in sys.path if path and Path(path).is_dir() and "site-packages" not in path)
ROWS = 150
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For Java processes that live for seconds: compiling less is faster."""


def environment(**more: str) -> dict[str, str]:
    named = {"PYTHONPATH": PATHS, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    return {**os.environ, **named, **more}


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def run(command: list[str], where: Path, **more: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**more), timeout=240, check=False, cwd=where
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def fill(url: str) -> None:
    with open_blocking_broker(url) as broker:
        broker.xadd_many("in", [{"event": str(n)} for n in range(ROWS)])


def check(url: str, output: str) -> dict[str, Any]:
    with open_blocking_broker(url) as broker:
        for stream in ("batch_out", "stream_out"):
            assert sorted(int(entry.text("event")) for entry in broker.xrange(stream)) == list(range(ROWS))
        assert [(group.name, group.lag) for group in broker.group_info("in")] == [("spark", 0)]
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    assert answer["rows"] == ROWS
    return answer


def asked(url: str, where: Path, **more: Any) -> str:
    return json.dumps({"url": url, "checkpoint": str(where / "checkpoint"), **more})


def test_spark_submit_finds_the_source_without_a_register_call(redis_url, tmp_path):
    fill(redis_url)
    submit = [str(spark_home() / "bin" / "spark-submit"), "--master", "local[2]"]
    submit += ["--conf", "spark.ui.enabled=false", "--conf", "spark.log.level=OFF", str(APP)]
    check(redis_url, run([*submit, asked(redis_url, tmp_path)], tmp_path))


@pytest.mark.at_length
def test_spark_connect(redis_url, tmp_path):
    fill(redis_url)
    check(redis_url, run([sys.executable, str(APP), asked(redis_url, tmp_path, remote="local[2]")], tmp_path))


def spark_42() -> str:
    """The interpreter that has PySpark 4.2."""
    if not (ROOT / ".venv-spark42" / "ready").exists():
        if os.environ.get("CI"):
            pytest.fail("Spark 4.2 is missing: run scripts/spark42.sh, as `make test` does")
        pytest.skip("Spark 4.2 is not installed: run scripts/spark42.sh")
    return str(ROOT / ".venv-spark42" / "bin" / "python")


def spark_42_variables() -> dict[str, str]:
    """The environment for that interpreter. SPARK_HOME may name another Spark for the tests as a whole."""
    python = spark_42()
    [home] = Path(python).parents[1].glob("lib/python*/site-packages/pyspark")
    return {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python, "SPARK_HOME": str(home)}


def test_spark_4_2(redis_url, tmp_path):
    python = spark_42()
    fill(redis_url)
    output = run([python, str(APP), asked(redis_url, tmp_path, master="local[2]")], tmp_path, **spark_42_variables())
    assert check(redis_url, output)["version"].startswith("4.2.")


@pytest.mark.at_length
def test_declarative_pipelines(redis_url, tmp_path):
    fill(redis_url)
    (tmp_path / "transformations").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(
        f"name: copy\nstorage: file://{tmp_path}/storage\nlibraries:\n  - glob:\n      include: transformations/**\n"
    )
    (tmp_path / "transformations" / "copy.py").write_text(
        "from pyspark import pipelines as dp\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.active()\n"
        f"sink = {{'url': '{redis_url}', 'stream': 'stream_out'}}\n"
        "dp.create_sink(name='out', format='redis_streams', options=sink)\n"
        "@dp.append_flow(target='out')\n"
        "def copy():\n"
        f"    options = {{'url': '{redis_url}', 'subscribe': 'in', 'startingOffsets': 'earliest'}}\n"
        "    return spark.readStream.format('redis_streams').options(**options).load()\n"
    )
    command = [str(spark_home() / "bin" / "spark-pipelines"), "run", "--spec", str(tmp_path / "spark-pipeline.yml")]
    run(command, tmp_path, SPARK_HOME=str(spark_home()))
    with open_blocking_broker(redis_url) as broker:
        assert sorted(int(entry.text("event")) for entry in broker.xrange("stream_out")) == list(range(ROWS))


class StandaloneCluster(NamedTuple):
    master: str
    hosts: tuple[str, str]
    where: Path

    def settings(self) -> dict[str, str]:
        return {
            "spark.executorEnv.PYTHONPATH": PATHS,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": SHORT_LIVED,
            "spark.driver.host": "127.0.0.1",
            "spark.cores.max": "2",
        }

    def executors(self) -> set[Path]:
        """The directories of all executors that were started so far."""
        return {path for path in self.where.glob("worker*/app-*/*") if path.is_dir()}


def second_host() -> str:
    """Another name of this machine, if it has one: to Spark, workers with different names are on different hosts."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            return "127.0.0.1"
    return "127.0.0.2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A standalone master and two workers, one core each, on loopback."""
    where = tmp_path_factory.mktemp("cluster")
    launch = str(spark_home() / "bin" / "spark-class")
    port = free_port()
    started = StandaloneCluster(f"spark://127.0.0.1:{port}", ("127.0.0.1", second_host()), where)
    parts = [["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]]
    for n, host in enumerate(started.hosts):
        parts.append(["worker.Worker", started.master, "--host", host, "--webui-port", str(free_port())])
        parts[-1] += ["--cores", "1", "--memory", "600m", "--work-dir", str(where / f"worker{n}")]
    daemons = environment(SPARK_DAEMON_JAVA_OPTS=SHORT_LIVED)
    with ExitStack() as stack:
        logs = []
        for at, command in enumerate(parts):
            log = stack.enter_context((where / f"part{at}.log").open("w+"))
            logs.append(Path(log.name))
            command[0] = f"org.apache.spark.deploy.{command[0]}"
            process = subprocess.Popen([launch, *command], stdout=log, stderr=log, env=daemons)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            if at == 0:
                wait_until(lambda: "I have been elected leader" in logs[0].read_text(), what="master", timeout_s=60)
        for log in logs[1:]:
            wait_until(
                lambda log=log: "Successfully registered" in log.read_text(),
                what="a worker of the cluster",
                timeout_s=60,
            )
        yield started


@pytest.mark.at_length  # `make test` runs a whole pipeline on such a cluster
def test_a_standalone_cluster_of_two_workers(cluster, redis_url, tmp_path):
    fill(redis_url)
    before = cluster.executors()
    command = [sys.executable, str(APP), asked(redis_url, tmp_path, master=cluster.master, spark=cluster.settings())]
    check(redis_url, run(command, tmp_path))
    assert len(cluster.executors() - before) == 2


# --- speculation: a task hangs in the middle of its write, and Spark starts a second attempt of it on another host

SPECULATED_ROWS = 480
HALF = 3
BATCH_ROWS = 40
ONCE = {
    "with_the_users_id": {"stream": "users_id", "txnAppId": "job", "txnVersion": "1"},
    "with_the_drivers_id": {"stream": "drivers_id"},
    "streaming": {"stream": "streaming", "streaming": True},
    "at_explicit_ids": {"stream": "explicit${part}", "idColumn": "key"},
    "by_event_id": {"stream": "event_id", "delivery": "exactly_once_by_event_id", "eventIdColumn": "key"},
}
PLANTED = {"no_marker": {"stream": "no_marker", "delivery": "at_least_once"}}


class Speculated(NamedTuple):
    """The rows in Redis after two attempts wrote the first partition."""

    rows: list[int]
    """As they lie in the stream; of several streams, one after the other."""
    attempts: dict[int, dict[str, str]]
    """The counts that each attempt of the first partition recorded at its end, by attempt number."""


@pytest.fixture(scope="module")
def speculated(
    cluster: StandaloneCluster, shared_redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Speculated]:
    """All writes in one application, because starting one takes longer than the writes."""
    if len(set(cluster.hosts)) == 1:
        pytest.skip("127.0.0.2 cannot be bound: Spark starts no second attempt on the host of the first")
    where = tmp_path_factory.mktemp("speculated")
    url, writes = shared_redis.url, {**ONCE, **PLANTED}
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS), **cluster.settings()}
    with open_blocking_broker(url) as broker:
        broker.transport.call(Command((b"FLUSHALL",)))
        broker.xadd_many("in", [{"event": str(n)} for n in range(SPECULATED_ROWS)])
        # Small chunks: a batch has several chunks, and the attempts overlap inside it.
        more = {name: {"chunkRows": "8", **write} for name, write in writes.items()}
        plan = {"rows": SPECULATED_ROWS, "half": HALF, "writes": more, "master": cluster.master, "spark": settings}
        run([sys.executable, str(SPECULATING_APP), asked(url, where, **plan)], where)
        return {name: _speculated(broker, str(write["stream"])) for name, write in writes.items()}


def _speculated(broker: BlockingBroker, stream: str) -> Speculated:
    streams = [stream.replace("${part}", str(part)) for part in range(2)] if "$" in stream else [stream]
    notes = [entry for entry in broker.xrange(f"notes:{stream}") if entry.text("what") == "ended"]
    return Speculated(
        [int(entry.text("event")) for each in streams for entry in broker.xrange(each)],
        {int(note.text("attempt")): {k.decode(): v.decode() for k, v in note.fields.items()} for note in notes},
    )


def check_attempts(speculated_write: Speculated) -> tuple[dict[str, int], dict[str, int]]:
    """The counts of both attempts, after checking that there were two in parallel, each with all rows."""
    assert set(speculated_write.attempts) == {0, 1}
    for fact in ("task", "executor"):
        assert len({attempt[fact] for attempt in speculated_write.attempts.values()}) == 2, fact
    first, copy = ({k: int(speculated_write.attempts[n][k]) for k in ("rows", "added", "skipped")} for n in range(2))
    assert first["rows"] == copy["rows"] == SPECULATED_ROWS // 2
    return first, copy


@pytest.mark.at_length
@pytest.mark.parametrize("write", ONCE)
def test_two_parallel_attempts_of_a_task_add_each_row_once(write: str, speculated):
    result: Speculated = speculated[write]
    first, copy = check_attempts(result)
    assert first["added"] >= HALF * BATCH_ROWS, "the first attempt had half of its rows stored"
    assert copy["added"] >= BATCH_ROWS, "its copy overtook it"
    assert first["added"] + copy["added"] == first["skipped"] + copy["skipped"] == SPECULATED_ROWS // 2
    for part in range(2):
        own = range(part * SPECULATED_ROWS // 2, (part + 1) * SPECULATED_ROWS // 2)
        assert [row for row in result.rows if row in own] == list(own), f"rows of partition {part}, in their order"
    assert len(result.rows) == SPECULATED_ROWS


@pytest.mark.at_length
def test_two_parallel_attempts_without_a_marker_duplicate_rows(speculated):
    """Checks the test itself: without a second attempt that writes, no row would be duplicated."""
    result: Speculated = speculated["no_marker"]
    first, copy = check_attempts(result)
    assert first["added"] == copy["added"] == SPECULATED_ROWS // 2
    twice = range(SPECULATED_ROWS // 2)
    assert sorted(result.rows) == sorted([*twice, *range(SPECULATED_ROWS)])


def test_a_redis_cluster(spark, tmp_path):
    """Streams and their markers are on all nodes."""
    with ClusterSetup() as cluster, open_blocking_broker(cluster.url) as broker:
        rows = spark.range(0, 200, 1, 2).selectExpr("cast(id AS STRING) AS value", "id % 9 AS part")
        for _ in range(2):
            rows.write.format("redis_streams").mode("append").options(
                url=cluster.url, stream="s${part}", content="value", txnAppId="job", txnVersion="1"
            ).save()
        read = spark.read.format("redis_streams").options(url=cluster.url, subscribePattern="s[0-8]")
        assert sorted(int(bytes(row["value"])) for row in read.load().collect()) == list(range(200))
        source = spark.readStream.format("redis_streams").options(
            url=cluster.url, subscribePattern="s[0-8]", startingOffsets="earliest", group="spark"
        )
        writer = source.load().writeStream.format("redis_streams").options(url=cluster.url, stream="all")
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        assert query.awaitTermination(90)
        assert sorted(int(entry.text("event")) for entry in broker.xrange("all")) == list(range(200))
        assert {group.lag for n in range(9) for group in broker.group_info(f"s{n}")} == {0}
