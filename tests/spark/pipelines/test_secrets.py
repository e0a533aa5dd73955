"""Only processes that connect read a password: a canary must not appear in any log, plan or file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from test_pipeline_processes import Command, commands  # noqa: F401  # pytest hands the fixture in by its name

from millstream.testing import MariadbDatabase, PostgresDatabase, RedisProcess, free_port, wait_until

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
DATABASE_SPEC = """\
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: KIND}
spec:
  source: {type: KIND, config: {dsn: "${KIND_DSN}", tables: [orders], MORE}}
  sinks:
    - {type: redis, config: {id: main, uri: "${REDIS_URI}", stream: KIND}}
  checkpoint: {path: CHECKPOINT}
"""


def descendants(pid: int) -> set[int]:
    parents = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    result = {pid}
    while more := {child for child, parent in parents.items() if parent in result} - result:
        result |= more
    return result


def seen_of(pids: set[int], what: str) -> dict[int, bytes]:
    received = {}
    for pid in pids:
        try:
            received[pid] = Path(f"/proc/{pid}/{what}").read_bytes()
        except OSError:
            continue
    return received


def files_below(*places: Path) -> Iterator[Path]:
    for location in places:
        yield from (path for path in location.rglob("*") if path.is_file())


@pytest.fixture
def guarded_redis() -> Iterator[RedisProcess]:
    with RedisProcess(["--requirepass", CANARY]) as server:
        yield server


def test_canary_value_appears_nowhere(
    commands: Any,  # noqa: F811
    guarded_redis: RedisProcess,
    postgres: PostgresDatabase,
    mariadb: MariadbDatabase,
    tmp_path: Path,
) -> None:
    """In Redis's addresses and in the dsn of databases, of pipelines that read rows and then changes."""
    port, ui, logs, kept_in = free_port(), free_port(), tmp_path / "events", tmp_path / "checkpoint"
    logs.mkdir()
    files = [tmp_path / f"{name}.yaml" for name in ("guarded", "postgres", "mariadb")]
    text = SPEC.replace("CHECKPOINT", str(kept_in / "guarded")).replace("UI", str(ui)).replace("LOGS", str(logs))
    files[0].write_text(text)
    for file, more in zip(files[1:], ("create: true", "snapshot: initial"), strict=True):
        text = DATABASE_SPEC.replace("KIND", file.stem).replace("MORE", more)
        file.write_text(text.replace("CHECKPOINT", str(kept_in / file.stem)))
    orders = ("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    postgres.execute(*orders, f"ALTER ROLE postgres PASSWORD '{CANARY}'")
    mariadb.execute(*orders, f"CREATE USER reader IDENTIFIED BY '{CANARY}'", "GRANT ALL ON *.* TO reader")
    at = f"reader:{CANARY}@127.0.0.1:{mariadb.server.port}"
    dsns = {
        "postgres_DSN": f"postgresql://postgres:{CANARY}@127.0.0.1:{postgres.server.port}/{postgres.name}",
        "mariadb_DSN": f"mariadb://{at}/{mariadb.name}",
    }
    client = redis.Redis(port=guarded_redis.port, password=CANARY)
    for number in range(200):
        client.xadd("in", {"event": f'{{"n": {number}}}' if number else "no JSON"})
    uri = guarded_redis.url.replace("://", f"://:{CANARY}@")
    words = ("run", *map(str, files), "--http-port", str(port))
    command: Command = commands(*words, REDIS_URI=uri, PASSWORD=CANARY, MILLSTREAM_SPARK_LOG="INFO", **dsns)
    wait_until(lambda: client.xlen("optional") == 199, what="all three sinks", timeout_s=150)
    followed: dict[str, PostgresDatabase | MariadbDatabase] = {"postgres": postgres, "mariadb": mariadb}
    wait_until(lambda: all(client.xlen(stream) == 2 for stream in followed), what="the rows", timeout_s=120)
    for database in followed.values():
        database.execute("INSERT INTO orders VALUES (3)")
    wait_until(lambda: all(client.xlen(stream) == 3 for stream in followed), what="the changes", timeout_s=120)
    everyone = descendants(command.process.pid)
    assert len(everyone) > 2, "a JVM and its Python workers were expected"
    reported = [pid for pid, line in seen_of(everyone, "cmdline").items() if CANARY.encode() in line]
    assert not reported, "the password stands on a command line"
    # Our own environment is the user's; the environment of child processes is ours.
    values = [
        pid for pid, all_ in seen_of(everyone - {command.process.pid}, "environ").items() if CANARY.encode() in all_
    ]
    assert not values, "a child was given the password in its environment"
    site, spark_site = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ui}"
    [application] = httpx.get(f"{spark_site}/api/v1/applications", timeout=60).json()
    api = f"{spark_site}/api/v1/applications/{application['id']}"
    pages = [
        *(f"{site}/{page}" for page in ("metrics", "pipelines", "pipelines/guarded", "health", "ready")),
        *(f"{site}/pipelines/guarded/{page}" for page in ("checkpoints", "dlq")),
        *(f"{site}/pipelines/{name}{page}" for name in ("postgres", "mariadb") for page in ("", "/checkpoints")),
        *(f"{api}/{page}" for page in ("environment", "jobs", "stages", "sql?details=true&planDescription=true")),
        *(f"{spark_site}/{page}/" for page in ("environment", "SQL", "StreamingQuery", "jobs", "executors")),
    ]
    for page in pages:
        answer = httpx.get(page, timeout=60, follow_redirects=True)
        assert answer.status_code == 200, page
        assert CANARY not in answer.text, page
    command.process.terminate()
    assert command.wait() == 0, command.log.read_text()[-2000:]
    stored = [*files_below(kept_in, logs), command.log]
    assert len(stored) > 10
    assert len(list(kept_in.glob("*/segments/*"))) > 2, "what was read ahead was looked into, too"
    assert not [path for path in stored if CANARY.encode() in path.read_bytes()]
    remaining = Path(os.environ.get("TMPDIR", "/tmp")).glob(f"millstream-secrets-{command.process.pid}-*")
    assert not list(remaining), "the files with the password outlived the run"


def test_a_cluster_s_executors_cannot_be_given_a_password_and_the_refusal_says_what_to_do(
    commands: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "guarded.yaml"
    file.write_text(SPEC.replace("CHECKPOINT", str(tmp_path / "checkpoint")).replace("UI", "0").replace("LOGS", "x"))
    words = ("run", str(file), "--http-port", "0", "--master", "spark://127.0.0.1:1")
    command = commands(*words, REDIS_URI=f"redis://:{CANARY}@127.0.0.1:1")
    assert command.wait() == 1
    output = command.log.read_text()
    assert "password_file" in output
    assert "same path on every host" in output
    assert CANARY not in output
    assert "Spark" not in output.replace("Spark's", ""), "nothing was started"
