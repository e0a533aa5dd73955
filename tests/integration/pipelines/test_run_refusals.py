"""``millstream pipeline run`` refuses a start before Spark: a missing password, a pipeline that runs already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.pipelines import json_schema
from millstream.pipelines.plan import make_plan
from millstream.pipelines.run_lease import RunLease
from millstream.pipelines.spec.load import load_pipeline
from millstream.testing import RedisProcess

pytest.importorskip("pyspark")

SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: orders}
spec:
  source: {type: generator, config: {rows: 10}}
  sinks:
    - {type: redis, config: {id: main, uri: "URL", stream: out}}
  checkpoint: {path: CHECKPOINT}
"""


def write_spec(directory: Path, url: str) -> Path:
    file = directory / "orders.yaml"
    file.write_text(SPEC.replace("URL", url).replace("CHECKPOINT", str(directory / "checkpoint")))
    return file


def millstream(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "millstream", "pipeline", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)


@pytest.mark.parametrize("standby", [[], ["--standby"]], ids=["run", "standby"])
def test_missing_password_of_a_sink_ends_with_exit_code_4(tmp_path: Path, standby: list[str]) -> None:
    with RedisProcess(["--requirepass", "secret"]) as server:
        done = millstream("run", str(write_spec(tmp_path, server.url)), "--http-port", "0", *standby)
    assert done.returncode == 4, done.stderr
    assert "--url" not in done.stderr
    assert "starting Spark" not in done.stderr


def test_second_run_ends_with_exit_code_8_and_ls_names_the_first(redis_server: RedisProcess, tmp_path: Path) -> None:
    file = write_spec(tmp_path, redis_server.url)
    lease = RunLease(make_plan(load_pipeline(file)))
    lease.acquire()
    try:
        done = millstream("run", str(file), "--http-port", "0")
        listed = millstream("ls", str(file), "-o", "json")
        reset = millstream("reset", str(file), "--yes")
    finally:
        lease.release()
    assert done.returncode == 8
    assert f"process {os.getpid()} on host" in done.stderr
    assert "starting Spark" not in done.stderr
    [item] = json.loads(listed.stdout)
    assert (item["state"], item["holder"]["process"]) == ("running", os.getpid())
    assert reset.returncode == 8
    assert (tmp_path / "checkpoint" / "millstream.json").exists()


def test_maxlen_of_the_redis_sink_is_described_in_the_schema() -> None:
    fields = json_schema()["$defs"]["RedisSinkConfig"]["properties"]
    assert "each write removes the oldest" in fields["maxlen"]["description"]
