"""The default checkpoint does not depend on the directory that the command is started in."""

from __future__ import annotations

from pathlib import Path

import pytest
from specs import pipeline

from millstream.pipelines import Checkpoint, load_pipeline
from millstream.pipelines.errors import CheckpointRefused

SPEC = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop, tenant: TENANT}
spec:
  source: {type: generator, config: {rows: 10}}
  sinks: [{type: files, config: {id: out, path: /nowhere}}]
"""


def write(directory: Path, tenant: str = "default") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "shop.yaml").write_text(SPEC.replace("TENANT", tenant))
    return directory / "shop.yaml"


def test_default_is_next_to_the_file_wherever_the_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    assert load_pipeline("specs/shop.yaml").checkpoint_path == str(tmp_path / "specs/checkpoints/default/shop")
    monkeypatch.chdir(tmp_path / "specs")
    result = load_pipeline("shop.yaml")
    monkeypatch.chdir("/")
    assert result.checkpoint_path == str(tmp_path / "specs/checkpoints/default/shop")


def test_tenants_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    paths = {load_pipeline(write(tmp_path, tenant)).checkpoint_path for tenant in ("a", "b")}
    assert len(paths) == 2


def test_spec_without_a_file_has_its_checkpoint_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert pipeline("orders", "t").checkpoint_path == "/state/millstream/checkpoints/t/orders"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert pipeline("orders", "t").checkpoint_path == "/home/me/.local/state/millstream/checkpoints/t/orders"


def test_directory_that_cannot_be_made_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(CheckpointRefused, match=r"checkpoint\.path"):
        Checkpoint(tmp_path / "checkpoints" / "default" / "shop").lock()


@pytest.mark.parametrize(
    ("configured", "path"),
    [
        ("file:///data/a%20b", "/data/a b"),
        ("file:////data/a", "/data/a"),
        ("file:///data/../a", "/a"),
        ("/data/a://b%20c", "/data/a:/b%20c"),  # no URI, so % is a character of the path
    ],
)
def test_checkpoint_path_is_absolute_and_decoded_once(configured: str, path: str) -> None:
    assert pipeline(checkpoint={"path": configured}).checkpoint_path == path
