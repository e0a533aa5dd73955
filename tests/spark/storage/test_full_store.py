"""A checkpoint's store that becomes full: the pipeline waits, continues once there is space, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from millstream.testing import RedisProcess, wait_until
from support.hadoop_stores import Hdfs, bare_jvm
from support.pipeline_process import PipelineProcess

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(600)]
START_MS = 1_700_000_000_000


@pytest.fixture
def gateway() -> Iterator[Any]:
    with bare_jvm() as running:
        yield running


@pytest.fixture
def hdfs(tmp_path: Path, gateway: Any) -> Iterator[Hdfs]:
    running = Hdfs(tmp_path / "hdfs")
    try:
        running.start()
        running.await_writes(gateway)
        yield running
    finally:
        running.kill()


def test_pipeline_waits_while_its_store_is_full(
    hdfs: Hdfs, gateway: Any, redis_server: RedisProcess, tmp_path: Path
) -> None:
    location = f"{hdfs.uri}/full"
    spec = {
        "source": {"type": "redis", "config": {"uri": redis_server.url, "stream": "in"}},
        "processors": [{"type": "deduplicate", "keys": ["row.n"], "watermark": "1 day"}],
        "sinks": [{"type": "redis", "config": {"id": "main", "uri": redis_server.url, "stream": "out"}}],
        "checkpoint": {"path": location},
        "spark": {"master": "local[2]"},
    }
    document = {"apiVersion": "millstream/v1", "kind": "Pipeline", "metadata": {"name": "full"}, "spec": spec}
    file = tmp_path / "full.yaml"
    file.write_text(yaml.safe_dump(document))
    client = redis.Redis(port=redis_server.port)
    jvm = gateway.jvm
    admin = jvm.org.apache.hadoop.hdfs.client.HdfsAdmin(
        jvm.java.net.URI.create(hdfs.uri), jvm.org.apache.hadoop.conf.Configuration()
    )
    directory = jvm.org.apache.hadoop.fs.Path(location)

    def send(first: int, last: int) -> None:
        for number in range(first, last):
            event = {"op": "c", "ts_ms": START_MS + number, "after": {"n": number}}
            client.xadd("in", {"event": json.dumps(event)})

    send(0, 50)
    run = PipelineProcess(file)
    try:
        wait_until(lambda: run.ended() or client.xlen("out") == 50, what="the first rows", timeout_s=240)
        run.must_run()
        admin.setSpaceQuota(directory, 1)
        send(50, 100)
        wait_until(lambda: run.ended() or "uota" in run.last_words(), what="the full store in the log", timeout_s=120)
        run.must_run()
        admin.clearSpaceQuota(directory)
        wait_until(lambda: run.ended() or client.xlen("out") >= 100, what="the other rows", timeout_s=240)
        run.must_run()
        run.process.terminate()
        assert run.process.wait(120) == 0, run.last_words()
    finally:
        run.kill()
    numbers = [json.loads(fields[b"event"])["after"]["n"] for _, fields in client.xrange("out")]
    assert sorted(numbers) == [*range(100)]
