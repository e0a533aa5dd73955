"""A real pipeline on Spark is paused and resumed through its own dashboard."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from millstream import open_blocking_broker
from millstream.testing import RedisProcess, free_port, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(900)]
SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: endless}
spec:
  source: {type: generator, config: {rows: 100000000, seed: 7}}
  sinks:
    - {type: redis, config: {id: out, uri: "URL", stream: out, required: true}}
  batch: {max_events: 200}
  checkpoint: {path: CHECKPOINT}
  spark: {master: "local[2]"}
"""


def test_a_running_pipeline_is_paused_and_resumed(redis_server: RedisProcess, tmp_path: Path) -> None:
    spec = tmp_path / "endless.yaml"
    spec.write_text(SPEC.replace("URL", redis_server.url).replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    log = tmp_path / "log"
    words = ["pipeline", "run", str(spec), "--quiet", "--http-port", str(free_port())]
    words += ["--dashboard", "--dashboard-port", "0"]
    with log.open("wb") as reported:
        process = subprocess.Popen(
            [sys.executable, "-m", "millstream", *words],
            stdout=reported,
            stderr=reported,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            start_new_session=True,
        )
    try:

        def address() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()[-3000:]
            return re.search(r"the dashboard is at (\S+)", log.read_text())

        result = wait_until(address, what="the dashboard", timeout_s=240)
        with httpx.Client(base_url=result[1], timeout=60) as http, open_blocking_broker(redis_server.url) as broker:
            wait_until(lambda: broker.xlen("out") > 0, what="the first rows", timeout_s=240)
            assert ">running</span>" in http.get("/pipelines").text
            _tell(http, "pause")
            paused = broker.xlen("out")
            assert ">paused</span>" in http.get("/pipelines").text
            assert broker.xlen("out") == paused
            _tell(http, "resume")
            wait_until(lambda: broker.xlen("out") > paused, what="more rows", timeout_s=240)
            assert 'class="bars"' in http.get("/pipelines").text
            assert b"pause pipeline endless" in broker.xrange("millstream.audit")[0].fields[b"what"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-3000:]
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, with all that it started
        process.wait()


def _tell(http: httpx.Client, verb: str) -> None:
    asked = http.get("/pipelines/confirm", params={"at": "0", "name": "endless", "verb": verb})
    csrf = re.search(r'name="csrf" value="([^"]+)"', asked.text)
    assert csrf is not None, asked.text
    form = {"csrf": csrf[1], "at": "0", "name": "endless", "verb": verb}
    done = http.post("/pipelines/confirm", data=form, headers={"origin": str(http.base_url).rstrip("/")})
    assert done.status_code == 303, done.text
    assert "Pipeline endless is" in http.get(done.headers["location"]).text
