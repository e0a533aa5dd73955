"""`pipeline prepare` creates an archive of Java classes, and pipelines run with it, also if it is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

pytestmark = [pytest.mark.spark, pytest.mark.at_length, pytest.mark.timeout(600)]

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {{name: {name}}}
spec:
  source: {{type: generator, config: {{rows: 10}}}}
  sinks: [{{type: redis, config: {{id: out, uri: "{url}", stream: {name}}}}}]
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The variables of a user, without those of the test run, and with a cache directory of their own."""
    own = ("MILLSTREAM_START_CACHE", "SPARK_HOME", "SPARK_SUBMIT_OPTS")
    return {**{name: value for name, value in os.environ.items() if name not in own}, "XDG_CACHE_HOME": str(tmp_path)}


def millstream(directory: Path, variables: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millstream", "pipeline", *args]
    return subprocess.run(
        command, cwd=directory, env=variables, capture_output=True, text=True, timeout=300, check=False
    )


def test_pipelines_run_with_a_prepared_and_with_a_damaged_archive(
    variables: dict[str, str], tmp_path: Path, redis_url: str
) -> None:
    prepared = millstream(tmp_path, variables, "prepare", "-o", "json")
    assert prepared.returncode == 0, prepared.stderr
    answer = json.loads(prepared.stdout)
    assert answer["created"] is True
    archive = Path(answer["archive"])
    assert archive.stat().st_size > 10_000_000
    assert archive.parent.stat().st_mode & 0o777 == 0o700
    again = millstream(tmp_path, variables, "prepare", "-o", "json")
    assert json.loads(again.stdout) == {**answer, "created": False}

    with redis.from_url(redis_url) as client:
        for name in ("prepared", "damaged"):
            (tmp_path / f"{name}.yaml").write_text(SPEC.format(name=name, url=redis_url))
            if name == "damaged":  # of the same size and age, so that only Java can notice it
                before = archive.stat()
                with archive.open("r+b") as file:
                    file.seek(before.st_size // 2)
                    file.write(os.urandom(1 << 20))
                os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns))
            done = millstream(tmp_path, variables, "run", "--once", f"{name}.yaml")
            assert done.returncode == 0, done.stderr
            assert client.xlen(name) == 10
