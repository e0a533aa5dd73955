"""A real Prometheus scrapes ``millstream pipeline run``: the alerts of pipelines fire for their causes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from millstream.testing import RedisProcess, free_port, wait_until
from tests.support.prometheus import Prometheus, needs_prometheus

pytestmark = [
    pytest.mark.spark,
    pytest.mark.at_length,  # `make test` tests each rule with promtool, which needs no time to pass
    needs_prometheus,
    pytest.mark.timeout(400),
]

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: NAME}
spec:
  source: {type: generator, config: {rows: 1000000, rate: 400}}
  sinks:
    - {type: redis, config: {id: main, uri: "URL", stream: NAME}}
    - type: redis
      config: {id: away, uri: "redis://127.0.0.1:PORT", stream: copies, required: false, queue: {max_bytes: 1}}
  batch: {max_events: 100}
  retry: {deadline: 2s}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""


def test_alerts_fire_for_a_full_sink_queue_and_a_failed_pipeline(redis_server: RedisProcess, tmp_path: Path) -> None:
    client, port = redis.Redis(port=redis_server.port), free_port()
    files = []
    for name in ("orders", "bills"):
        text = SPEC.replace("NAME", name).replace("URL", redis_server.url).replace("PORT", str(free_port()))
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoints" / name)))
    words = ["pipeline", "run", *map(str, files), "--http-port", str(port), "--stay", "--quiet"]
    path = os.pathsep.join(filter(None, sys.path))
    with (tmp_path / "run.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "millstream", *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        wait_until(lambda: client.xlen("orders") > 0 and client.xlen("bills") > 0, what="batches", timeout_s=150)
        with Prometheus(tmp_path, port) as prometheus:
            prometheus.wait_for("SinkQueueFull", timeout_s=120)
            assert not prometheus.are_firing("PipelineFailed")
            client.set("text", "not a stream")
            client.rename("text", "bills")  # the pipeline cannot write there any more
            prometheus.wait_for("PipelineFailed", timeout_s=120)
            failed = prometheus.series('millstream_pipeline_status{state="failed"} == 1')
            assert [series["metric"]["pipeline"] for series in failed] == ["bills"]
    finally:
        process.terminate()
        process.wait(90)
