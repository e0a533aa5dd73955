"""The same application in every place: spark-submit, Connect, pipelines, a cluster, Spark 4.2, `millstream serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from millstream import open_blocking_broker
from millstream.testing import free_port, wait_until
from millstream.testing.serving import ServeProcess
from millstream.testing.topologies import ClusterSetup

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

APP = Path(__file__).with_name("spark_app.py")
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(path for path in sys.path if path and Path(path).is_dir() and "site-packages" not in path)
ROWS = 150


def environment(**more: str) -> dict[str, str]:
    named = {"PYTHONPATH": PATHS, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    return {**os.environ, **named, **more}


def spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def run(words: list[str], where: Path, **more: str) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(**more), timeout=240, check=False, cwd=where
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def fill(url: str) -> None:
    with open_blocking_broker(url) as broker:
        broker.xadd_many("in", [{"event": str(n)} for n in range(ROWS)])


def check(url: str, said: str) -> dict[str, Any]:
    with open_blocking_broker(url) as broker:
        for stream in ("batch_out", "stream_out"):
            assert sorted(int(entry.text("event")) for entry in broker.xrange(stream)) == list(range(ROWS))
        assert [(group.name, group.lag) for group in broker.group_info("in")] == [("spark", 0)]
    answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    assert answer["rows"] == ROWS
    return answer


def asked(url: str, where: Path, **more: Any) -> str:
    return json.dumps({"url": url, "checkpoint": str(where / "checkpoint"), **more})


def test_spark_submit_finds_the_source_without_a_register_call(redis_url, tmp_path):
    fill(redis_url)
    submit = [str(spark_home() / "bin" / "spark-submit"), "--master", "local[2]"]
    submit += ["--conf", "spark.ui.enabled=false", "--conf", "spark.log.level=OFF", str(APP)]
    check(redis_url, run([*submit, asked(redis_url, tmp_path)], tmp_path))


def test_spark_connect(redis_url, tmp_path):
    fill(redis_url)
    check(redis_url, run([sys.executable, str(APP), asked(redis_url, tmp_path, remote="local[2]")], tmp_path))


def test_millstream_serve(tmp_path):
    with ServeProcess() as server:
        fill(server.url)
        check(server.url, run([sys.executable, str(APP), asked(server.url, tmp_path, master="local[2]")], tmp_path))


def spark_42() -> str:
    """The interpreter that has PySpark 4.2."""
    if not (ROOT / ".venv-spark42" / "ready").exists():
        if os.environ.get("CI"):
            pytest.fail("Spark 4.2 is missing: run scripts/spark42.sh, as `make test` does")
        pytest.skip("Spark 4.2 is not installed: run scripts/spark42.sh")
    return str(ROOT / ".venv-spark42" / "bin" / "python")


def test_spark_4_2(redis_url, tmp_path):
    python = spark_42()
    fill(redis_url)
    names = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    said = run([python, str(APP), asked(redis_url, tmp_path, master="local[2]")], tmp_path, **names)
    assert check(redis_url, said)["version"].startswith("4.2.")


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A standalone master and two workers, one core each, on loopback."""
    launch = str(spark_home() / "bin" / "spark-class")
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    parts = [["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]]
    for n in range(2):
        parts.append(["worker.Worker", master, "--host", "127.0.0.1", "--webui-port", str(free_port())])
        parts[-1] += ["--cores", "1", "--memory", "600m", "--work-dir", str(tmp_path / f"worker{n}")]
    with ExitStack() as stack:
        logs = []
        for at, words in enumerate(parts):
            log = stack.enter_context((tmp_path / f"part{at}.log").open("w+"))
            logs.append(Path(log.name))
            words[0] = f"org.apache.spark.deploy.{words[0]}"
            process = subprocess.Popen([launch, *words], stdout=log, stderr=log, env=environment())
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            if at == 0:
                wait_until(lambda: "I have been elected leader" in logs[0].read_text(), what="master", timeout_s=60)
        for log in logs[1:]:
            wait_until(
                lambda log=log: "Successfully registered" in log.read_text(),
                what="a worker of the cluster",
                timeout_s=60,
            )
        yield master


def test_a_standalone_cluster_of_two_workers(cluster, redis_url, tmp_path):
    fill(redis_url)
    settings = {
        "spark.executorEnv.PYTHONPATH": PATHS,
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.cores.max": "2",
    }
    words = [sys.executable, str(APP), asked(redis_url, tmp_path, master=cluster, spark=settings)]
    check(redis_url, run(words, tmp_path))
    executors = [path for n in range(2) for path in (tmp_path / f"worker{n}").glob("app-*/*") if path.is_dir()]
    assert len(executors) == 2


def test_a_redis_cluster(spark, tmp_path):
    """Streams on all nodes, their markers beside them."""
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
