"""A password is read by those who connect, and by nobody else: a canary is looked for wherever traces are left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from test_pipeline_processes import Command, commands  # noqa: F401  # pytest hands the fixture in by its name

from millstream.testing import RedisProcess, free_port, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

CANARY = "canary-7f3a-in-the-mine"
SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: guarded}
spec:
  source: {type: redis, config: {uri: "${REDIS_URI}", stream: in}}
  sinks:
    - {type: redis, config: {id: main, uri: "${REDIS_URI}", stream: out}}
    - {type: redis, config: {id: second, uri: "${REDIS_URI}", stream: second}}
    - {type: redis, config: {id: optional, uri: "${REDIS_URI}", stream: optional, required: false}}
  checkpoint: {path: CHECKPOINT}
  spark:
    master: local[2]
    conf:
      spark.ui.enabled: "true"
      spark.ui.port: "UI"
      spark.eventLog.enabled: "true"
      spark.eventLog.dir: LOGS
      spark.hadoop.fs.s3a.secret.key: canary-7f3a-in-the-mine
"""


def descendants(pid: int) -> set[int]:
    parents = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def seen_of(pids: set[int], what: str) -> dict[int, bytes]:
    seen = {}
    for pid in pids:
        try:
            seen[pid] = Path(f"/proc/{pid}/{what}").read_bytes()
        except OSError:
            continue
    return seen


def files_below(*places: Path) -> Iterator[Path]:
    for place in places:
        yield from (path for path in place.rglob("*") if path.is_file())


@pytest.fixture
def guarded_redis() -> Iterator[RedisProcess]:
    with RedisProcess(["--requirepass", CANARY]) as server:
        yield server


def test_a_canary_is_found_nowhere(commands: Any, guarded_redis: RedisProcess, tmp_path: Path) -> None:  # noqa: F811
    port, ui, logs = free_port(), free_port(), tmp_path / "events"
    logs.mkdir()
    file = tmp_path / "guarded.yaml"
    text = SPEC.replace("CHECKPOINT", str(tmp_path / "checkpoint")).replace("UI", str(ui)).replace("LOGS", str(logs))
    file.write_text(text)
    client = redis.Redis(port=guarded_redis.port, password=CANARY)
    for number in range(200):
        client.xadd("in", {"event": f'{{"n": {number}}}' if number else "no JSON"})
    uri = guarded_redis.url.replace("://", f"://:{CANARY}@")
    command: Command = commands(
        "run", str(file), "--http-port", str(port), REDIS_URI=uri, PASSWORD=CANARY, MILLSTREAM_SPARK_LOG="INFO"
    )
    wait_until(lambda: client.xlen("optional") == 199, what="all three sinks", timeout_s=150)
    everyone = descendants(command.process.pid)
    assert len(everyone) > 2, "a JVM and its Python workers were expected"
    told = [pid for pid, line in seen_of(everyone, "cmdline").items() if CANARY.encode() in line]
    assert not told, "the password stands on a command line"
    # Our own environment is the user's; what we hand on is ours.
    given = [
        pid for pid, all_ in seen_of(everyone - {command.process.pid}, "environ").items() if CANARY.encode() in all_
    ]
    assert not given, "a child was given the password in its environment"
    site, spark_site = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ui}"
    [application] = httpx.get(f"{spark_site}/api/v1/applications", timeout=60).json()
    api = f"{spark_site}/api/v1/applications/{application['id']}"
    pages = [
        *(f"{site}/{page}" for page in ("metrics", "pipelines", "pipelines/guarded", "health", "ready")),
        *(f"{site}/pipelines/guarded/{page}" for page in ("checkpoints", "dlq")),
        *(f"{api}/{page}" for page in ("environment", "jobs", "stages", "sql?details=true&planDescription=true")),
        *(f"{spark_site}/{page}/" for page in ("environment", "SQL", "StreamingQuery", "jobs", "executors")),
    ]
    for page in pages:
        answer = httpx.get(page, timeout=60, follow_redirects=True)
        assert answer.status_code == 200, page
        assert CANARY not in answer.text, page
    command.process.terminate()
    assert command.wait() == 0, command.log.read_text()[-2000:]
    kept = [*files_below(tmp_path / "checkpoint", logs), command.log]
    assert len(kept) > 10
    assert not [path for path in kept if CANARY.encode() in path.read_bytes()]
    left = Path(os.environ.get("TMPDIR", "/tmp")).glob(f"millstream-secrets-{command.process.pid}-*")
    assert not list(left), "the files with the password outlived the run"


def test_a_cluster_s_executors_cannot_be_given_a_password_and_the_refusal_says_what_to_do(
    commands: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "guarded.yaml"
    file.write_text(SPEC.replace("CHECKPOINT", str(tmp_path / "checkpoint")).replace("UI", "0").replace("LOGS", "x"))
    words = ("run", str(file), "--http-port", "0", "--master", "spark://127.0.0.1:1")
    command = commands(*words, REDIS_URI=f"redis://:{CANARY}@127.0.0.1:1")
    assert command.wait() == 1
    said = command.log.read_text()
    assert "password_file" in said
    assert "same path on every host" in said
    assert CANARY not in said
    assert "Spark" not in said.replace("Spark's", ""), "nothing was started"
