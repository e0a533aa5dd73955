"""``millstream pipeline`` over checkpoints that are missing, or somebody else's: it says so, and leaves them alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specs import pipeline
from typer.testing import CliRunner, Result

from millstream.cli.pipeline import app
from millstream.pipelines.checkpoint import Checkpoint
from millstream.pipelines.errors import CheckpointRefused
from millstream.pipelines.plan import plan

NOBODY = ("--http-port", "1")


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


def test_a_checkpoint_that_is_not_there(file: Path) -> None:
    assert json.loads(typed("status", file, *NOBODY, "-o", "json").stdout)["state"] == "never started"
    assert json.loads(typed("checkpoints", file, "-o", "json").stdout) == []
    said = typed("reset", file)
    assert isinstance(said.exception, CheckpointRefused), "without a question: there is nothing to remove"
    assert "nothing was removed" in str(said.exception)


def test_its_own(file: Path, tmp_path: Path) -> None:
    Checkpoint(tmp_path / "c").open(plan(pipeline()))
    assert json.loads(typed("status", file, *NOBODY, "-o", "json").stdout)["state"] == "not running"
    assert typed("reset", file, "--yes").exit_code == 0
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("words", [("status", *NOBODY), ("checkpoints",), ("reset", "--yes")])
def test_one_of_another_pipeline_is_neither_shown_nor_removed(
    words: tuple[str, ...], file: Path, tmp_path: Path
) -> None:
    Checkpoint(tmp_path / "c").open(plan(pipeline("others")))
    said = typed(words[0], file, *words[1:])
    assert isinstance(said.exception, CheckpointRefused)
    assert "belongs to pipeline 'others'" in str(said.exception)
    assert (tmp_path / "c" / "millstream.json").exists()


def test_plan_says_that_it_is_another_s(file: Path, tmp_path: Path) -> None:
    Checkpoint(tmp_path / "c").open(plan(pipeline("others")))
    lines = json.loads(typed("plan", file, "-o", "json").stdout)["plan"]
    assert any(line["how"].startswith("DOES NOT FIT: it belongs to pipeline 'others'") for line in lines)


def test_plan_says_that_a_directory_is_no_checkpoint(file: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("x")
    lines = json.loads(typed("plan", file, "-o", "json").stdout)["plan"]
    assert any("the directory is not empty" in line["how"] for line in lines)
