"""``millstream pipeline`` in a terminal: what it waits for, what went through, and none of Spark's own lines."""

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
    """``more``: lines behind those of the spec."""
    (directory / "shop.yaml").write_text(SPEC.replace("QUERY", query) + more)
    known = {"REDIS_URI": url, "TMPDIR": str(directory), "PYSPARK_PYTHON": sys.executable}
    environment = {**os.environ, **known, **variables}
    words = (MILLSTREAM, "pipeline", *words)
    return subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_a_run_says_what_it_waits_for_and_what_went_through(tmp_path: Path, redis_url: str) -> None:
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
    assert list(tmp_path.glob("millstream-spark-*")) == [], "all went well: nobody needs Spark's log"


def test_sql_that_does_not_parse_is_found_by_validate(tmp_path: Path, redis_url: str) -> None:
    done = types(tmp_path, redis_url, "SELECT id FORM events", "validate", "shop.yaml")
    assert done.returncode == 1
    assert "pick: query: [PARSE_SYNTAX_ERROR] Syntax error at or near 'events'" in done.stderr
    assert "Traceback" not in done.stderr


NO_JAVA = "JAVA_HOME is /nowhere, where no bin/java is. Unset it, or let it name a Java of 17 or newer."


def test_without_a_java_a_run_ends_in_one_sentence_and_validate_warns(tmp_path: Path, redis_url: str) -> None:
    query = "SELECT * FROM events"
    for command in ("run", "replay-dead-letters"):
        done = types(tmp_path, redis_url, query, command, "shop.yaml", JAVA_HOME="/nowhere")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {NO_JAVA}\n")
    checked = types(tmp_path, redis_url, query, "validate", "shop.yaml", JAVA_HOME="/nowhere")
    assert (checked.returncode, checked.stdout) == (0, "shop: fine\n")
    assert checked.stderr == f"warning: {NO_JAVA}\n"


def test_a_java_that_ends_at_once_is_quoted_and_its_log_is_named(tmp_path: Path, redis_url: str) -> None:
    words = ("run", "shop.yaml", "--once", "--http-port", "0", "-q")
    done = types(tmp_path, redis_url, "SELECT * FROM events", *words, more="  spark: {conf: {spark.driver.memory: 1k}}")
    told = r"Java ended: Error occurred during initialization of VM: Too small maximum heap"
    found = re.fullmatch(rf"error: Spark did not start: {told}\. All that it said is in (\S+)\. Mend .*\n", done.stderr)
    assert found is not None, done.stderr
    assert done.returncode == 1
    assert Path(found[1]).exists()
