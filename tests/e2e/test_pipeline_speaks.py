"""Output of ``millstream pipeline`` in a terminal: its state and counts, and no lines of Spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MILLSTREAM = str(Path(sys.executable).with_name("millstream"))
SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: generator, config: {rows: 200, seed: 1}}
  processors: [{id: pick, type: sql, query: "QUERY"}]
  sinks: [{type: redis, config: {id: out, uri: "${REDIS_URI}", stream: picked}}]
"""
pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def types(
    directory: Path, url: str, query: str, *words: str, more: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """``more``: lines after those of the spec."""
    (directory / "shop.yaml").write_text(SPEC.replace("QUERY", query) + more)
    known = {"REDIS_URI": url, "TMPDIR": str(directory), "PYSPARK_PYTHON": sys.executable}
    environment = {**os.environ, **known, **variables}
    words = (MILLSTREAM, "pipeline", *words)
    return subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_run_prints_its_state_and_counts(tmp_path: Path, redis_url: str) -> None:
    query = "SELECT * FROM events WHERE op = 'c'"
    done = types(tmp_path, redis_url, query, "run", "shop.yaml", "--once", "--http-port", "0", "--master", "local[2]")
    assert done.returncode == 0, done.stderr
    assert "starting Spark on local[2]" in done.stderr
    assert "waiting for the first batch" in done.stderr
    assert re.search(r"^  [\d,]+ rows in, [\d.]+ s, [\d,]+ rows/s$", done.stderr, re.M)
    assert re.search(r"^  sink out: [1-9]\d* rows out$", done.stderr, re.M)
    foreign = [line for line in done.stderr.splitlines() if re.search(r"\bWARN\b|\bINFO\b|^\s+at |log4j|[Jj]ava", line)]
    assert foreign == []
    assert done.stdout == ""
    assert list(tmp_path.glob("millstream-spark-*")) == [], "after a success the log of Spark is not kept"


def test_finite_pipeline_ends_and_a_second_run_continues_from_any_directory(tmp_path: Path, redis_url: str) -> None:
    query = "SELECT * FROM events"
    first = types(tmp_path, redis_url, query, "run", "shop.yaml", "--http-port", "0", "--master", "local[2]")
    assert first.returncode == 0, first.stderr
    checkpoint = tmp_path / "checkpoints" / "default" / "shop"
    assert f"shop: starts from the beginning of its source; its checkpoint is {checkpoint}" in first.stderr
    assert re.search(r"^shop: finished, last batch 0$", first.stderr, re.M)
    assert re.search(r"^  200 rows in", first.stderr, re.M)
    assert not re.search(r"(batch|lag) -|- rows|- ms", first.stderr), "no dashes in place of numbers"
    (tmp_path / "elsewhere").mkdir()
    words = ("run", str(tmp_path / "shop.yaml"), "--once", "--http-port", "0", "--master", "local[2]")
    second = types(tmp_path / "elsewhere", redis_url, query, *words)
    assert second.returncode == 0, second.stderr
    assert f"shop: continues after batch 0 of its checkpoint {checkpoint}" in second.stderr
    assert "shop: finished, last batch 0 (continued after batch 0 of its checkpoint)" in second.stderr
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()


def test_validate_detects_sql_that_does_not_parse(tmp_path: Path, redis_url: str) -> None:
    done = types(tmp_path, redis_url, "SELECT id FORM events", "validate", "shop.yaml")
    assert done.returncode == 1
    assert "pick: query: [PARSE_SYNTAX_ERROR] Syntax error at or near 'events'" in done.stderr
    assert "Traceback" not in done.stderr


NO_JAVA = "JAVA_HOME is /nowhere, which has no bin/java. Unset it, or set it to a Java 17 or newer."


def test_run_without_java_ends_with_one_sentence_and_validate_warns(tmp_path: Path, redis_url: str) -> None:
    query = "SELECT * FROM events"
    for command in ("run", "replay-dead-letters"):
        done = types(tmp_path, redis_url, query, command, "shop.yaml", JAVA_HOME="/nowhere")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {NO_JAVA}\n")
    checked = types(tmp_path, redis_url, query, "validate", "shop.yaml", JAVA_HOME="/nowhere")
    assert (checked.returncode, checked.stdout) == (0, "shop: valid\n")
    assert checked.stderr == f"warning: {NO_JAVA}\n"


def test_failing_java_is_quoted_with_its_log(tmp_path: Path, redis_url: str) -> None:
    words = ("run", "shop.yaml", "--once", "--http-port", "0", "-q")
    done = types(tmp_path, redis_url, "SELECT * FROM events", *words, more="  spark: {conf: {spark.driver.memory: 1k}}")
    reason = r"Java ended: Error occurred during initialization of VM: Too small maximum heap"
    match = re.fullmatch(rf"error: Spark did not start: {reason}\. Its output is in (\S+)\. Check .*\n", done.stderr)
    assert match is not None, done.stderr
    assert done.returncode == 1
    assert Path(match[1]).exists()
