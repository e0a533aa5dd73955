"""``millstream pipeline`` with servers that refuse the login: exit code 4, and advice that fits a pipeline's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.cli.main import DENIED, FAILED
from millstream.testing.servers import RedisProcess

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: generator, config: {rows: 10}}
  sinks: [{type: redis, config: {id: out, uri: "URI", stream: picked}}]
  checkpoint: {path: CHECKPOINT}
"""


def run_pipeline(directory: Path, uri: str, *words: str) -> subprocess.CompletedProcess[str]:
    text = SPEC.replace("URI", uri).replace("CHECKPOINT", str(directory / "checkpoint"))
    (directory / "shop.yaml").write_text(text)
    command = [sys.executable, "-m", "millstream", "pipeline", "run", "shop.yaml", "--http-port", "0", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("login", ["", ":wr0ng@"])
def test_refused_login_of_a_sink_exits_with_4_and_advises_the_file(tmp_path: Path, login: str) -> None:
    with RedisProcess(["--requirepass", "right"]) as server:
        done = run_pipeline(tmp_path, server.url.replace("redis://", f"redis://{login}"))
    assert done.returncode == DENIED, done.stderr
    assert "sink out" in done.stderr
    assert "--url" not in done.stderr
    assert "MILLSTREAM_URL" not in done.stderr
    assert "wr0ng" not in done.stderr
    if not login:
        assert "password_file" in done.stderr


def test_refused_login_among_other_problems_exits_with_1(tmp_path: Path) -> None:
    with RedisProcess(["--requirepass", "right"]) as server:
        endless = SPEC.replace("{rows: 10}", "{}")
        text = endless.replace("URI", server.url).replace("CHECKPOINT", str(tmp_path / "other"))
        (tmp_path / "endless.yaml").write_text(text.replace("name: shop", "name: endless"))
        done = run_pipeline(tmp_path, server.url, "endless.yaml", "--once")
    assert done.returncode == FAILED, done.stderr
    assert "never ends" in done.stderr
