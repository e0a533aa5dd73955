"""``millstream pipeline`` with checkpoints that are missing or another pipeline's: an error, and no change."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from specs import pipeline
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner, Result

from millstream.cli.pipeline import app
from millstream.errors import BrokerUnavailable
from millstream.observe.http import HttpServer
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused, NoSuchCheckpoint, PipelineRuns, SpecRefused
from millstream.pipelines.plan import make_plan

UNUSED_PORT = ("--http-port", "1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    spec = tmp_path / "orders.yaml"
    spec.write_text(
        f"""
apiVersion: millstream/v1
kind: Pipeline
metadata: {{name: orders}}
spec:
  source: {{type: generator, config: {{rows: 10}}}}
  sinks: [{{type: redis, config: {{id: main, stream: out, uri: "redis://127.0.0.1:1"}}}}]
  checkpoint: {{path: "{tmp_path / "c"}"}}
"""
    )
    return spec


def typed(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_missing_checkpoint(file: Path) -> None:
    assert json.loads(typed("status", file, *UNUSED_PORT, "-o", "json").stdout)["state"] == "never started"
    assert json.loads(typed("checkpoints", file, "-o", "json").stdout) == []
    output = typed("reset", file)
    assert isinstance(output.exception, NoSuchCheckpoint), "without a question: there is nothing to remove"
    assert "nothing was removed" in str(output.exception)


def test_own_checkpoint_is_shown_and_removed(file: Path, tmp_path: Path) -> None:
    Checkpoint(tmp_path / "c").open(make_plan(pipeline()))
    assert json.loads(typed("status", file, *UNUSED_PORT, "-o", "json").stdout)["state"] == "not running"
    assert typed("reset", file, "--yes").exit_code == 0
    assert not (tmp_path / "c").exists()


def test_checkpoint_of_a_running_process_is_not_removed(file: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.open(make_plan(pipeline()))
    with subprocess.Popen(["sleep", "60"]) as running:
        (tmp_path / "c" / "control.json").write_text(json.dumps({"url": None, "pid": running.pid}))
        output = typed("reset", file, "--yes")
        assert isinstance(output.exception, PipelineRuns)
        assert f"runs, in process {running.pid}: nothing was removed. Stop it first." in str(output.exception)
        assert (tmp_path / "c" / "millstream.json").exists()
        assert checkpoint.answers_at() is None, "it runs, and answers nowhere"
        running.kill()
    assert typed("reset", file, "--yes").exit_code == 0, "what was killed leaves its word, and does not count"
    assert not (tmp_path / "c").exists()


def test_checkpoint_of_another_host_is_not_removed_while_redis_does_not_answer(file: Path, tmp_path: Path) -> None:
    """The hosts share the directory. Only the lease in Redis says whether the process on the other one has ended."""
    Checkpoint(tmp_path / "c").open(make_plan(pipeline()))
    control = tmp_path / "c" / "control.json"
    control.write_text(json.dumps({"url": None, "host": "another", "pid": 1 << 30}))
    assert isinstance(typed("reset", file, "--yes").exception, BrokerUnavailable)
    assert (tmp_path / "c" / "millstream.json").exists()
    control.unlink()
    assert typed("reset", file, "--yes").exit_code == 0


def test_pipeline_without_a_port_is_shown_as_running(file: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.open(make_plan(pipeline()))
    checkpoint.announce(None)
    reported = typed("status", file, "-o", "json")
    assert json.loads(reported.stdout)["state"] == "running"
    assert f"'orders' runs in process {os.getpid()}, which has no HTTP port (--http-port 0)" in reported.stderr
    assert [row["state"] for row in json.loads(typed("ls", file, "-o", "json").stdout)] == ["running"]
    checkpoint.withdraw()
    reported = typed("status", file, "-o", "json")
    assert (json.loads(reported.stdout)["state"], reported.stderr) == ("not running", "")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell when a process began")
def test_reused_process_id_is_not_the_killed_process(file: Path, tmp_path: Path) -> None:
    """In a container every process is number 1, this one too."""
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.open(make_plan(pipeline()))
    checkpoint.announce(None)
    control = tmp_path / "c" / "control.json"
    control.write_text(json.dumps(json.loads(control.read_text()) | {"began": 1}))
    assert checkpoint.run_by() is None
    assert json.loads(typed("status", file, "-o", "json").stdout)["state"] == "not running"
    assert typed("reset", file, "--yes").exit_code == 0


@pytest.mark.parametrize("words", [("status", *UNUSED_PORT), ("checkpoints",), ("reset", "--yes")])
def test_checkpoint_of_another_pipeline_is_neither_shown_nor_removed(
    words: tuple[str, ...], file: Path, tmp_path: Path
) -> None:
    Checkpoint(tmp_path / "c").open(make_plan(pipeline("others")))
    output = typed(words[0], file, *words[1:])
    assert isinstance(output.exception, CheckpointRefused)
    assert "belongs to pipeline 'others'" in str(output.exception)
    assert (tmp_path / "c" / "millstream.json").exists()


def test_plan_reports_the_checkpoint_of_another_pipeline(file: Path, tmp_path: Path) -> None:
    Checkpoint(tmp_path / "c").open(make_plan(pipeline("others")))
    output = typed("plan", file, "-o", "json")
    [made] = json.loads(output.stdout)
    assert (output.exit_code, made["fits"]) == (1, False)
    [why] = [line["how"] for line in made["plan"] if line["fits"] is False]
    assert why.startswith("it belongs to pipeline 'others'")


def test_plan_reports_a_directory_that_is_not_a_checkpoint(file: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("x")
    [made] = json.loads(typed("plan", file, "-o", "json").stdout)
    assert any("the directory is not empty" in line["how"] for line in made["plan"])


def test_running_pipeline_is_found_on_any_port(file: Path, tmp_path: Path) -> None:
    """It prints the same record as HTTP."""
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.open(make_plan(pipeline()))
    asleep = json.loads(typed("status", file, "-o", "json").stdout)
    live = {**asleep, "state": "running", "sinks": {"main": "retrying"}, "progress": {"rows": 5, "lag": 3}}
    asked: list[str | None] = []

    async def answer(request: Request) -> JSONResponse:
        asked.append(request.headers.get("authorization"))
        return JSONResponse(live)

    with HttpServer(Starlette(routes=[Route("/pipelines/orders", answer)]), port=0) as server:
        checkpoint.announce(server.url)
        assert json.loads(typed("status", file, "-o", "json").stdout) == live
        assert "retrying" in typed("status", file).stdout
        (tmp_path / "token").write_text("sesame\n")
        typed("status", file, "--http-token-file", tmp_path / "token")
        assert asked == [None, None, "Bearer sesame"]
        checkpoint.withdraw()
        assert json.loads(typed("status", file, "-o", "json").stdout) == asleep
    (tmp_path / "c" / "control.json").write_text('{"url": "http://127.0.0.1:1", "pid": 999999999}')
    assert json.loads(typed("status", file, "-o", "json").stdout) == asleep, "it was killed"


def test_checkpoint_may_be_in_a_store_with_a_known_scheme(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    for scheme in ("s3a", "hdfs", "abfss", "gs"):
        file.write_text(text.replace(str(tmp_path / "c"), f"{scheme}://bucket/c/"))
        assert typed("validate", file).exit_code == 0
    for scheme, advice in (("S3", "s3a://"), ("redis", "hdfs"), ("file", "file:///directory")):
        file.write_text(text.replace(str(tmp_path / "c"), f"{scheme}://bucket/c"))
        refused = typed("validate", file)
        assert isinstance(refused.exception, SpecRefused)
        assert advice in str(refused.exception)


def test_plan_shows_the_real_path_of_the_checkpoint(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace(str(tmp_path / "c"), f"file://{tmp_path}/link"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    [made] = json.loads(typed("plan", file, "-o", "json").stdout)
    [reported] = [line["how"] for line in made["plan"] if line["part"] == "checkpoint"]
    assert reported == str(tmp_path / "real")
