"""The wheel without extras, in an environment without Spark, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PIPELINE = """
apiVersion: millstream/v1
kind: Pipeline
metadata: {name: shop}
spec:
  source: {type: generator, config: {rows: 10}}
  sinks: [{type: redis, config: {id: out, uri: "redis://127.0.0.1:1", stream: out}}]
"""

EVERY_HELP = """
from typer.main import get_command
from typer.testing import CliRunner
from millstream.cli.main import CHAPTERS, build

for name, chapter in CHAPTERS.items():
    app = build([name])
    words = [[], [name]]
    if chapter.is_group:
        words += [[name, word] for word in get_command(app).commands[name].commands]
    for line in words:
        done = CliRunner().invoke(app, [*line, "--help"])
        assert done.exit_code == 0, (line, done.output, done.exception)
        print(done.output)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its dependencies; these are linked from here, which takes no time."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    if "hatchling" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("the build backend cannot be had here")
    assert built.returncode == 0, built.stderr
    venv.create(place / "env", symlinks=True)
    [packages] = (place / "env" / "lib").glob("python*/site-packages")
    for name in needed("millstream"):
        transport(name, packages)
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return place


def needed(name: str, result: set[str] | None = None) -> set[str]:
    """The distributions that this one asks for without any extra, and those that they ask for."""
    result = set() if result is None else result
    for text in metadata.requires(name) or ():
        wanted = Requirement(text)
        if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and wanted.name not in result:
            result.add(wanted.name)
            needed(wanted.name, result)
    return result


def transport(name: str, packages: Path) -> None:
    tops = {file.parts[0] for file in metadata.files(name) or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        here = Path(str(metadata.distribution(name).locate_file(top)))
        if not (packages / top).exists():
            (packages / top).symlink_to(here)


class Newcomer:
    def __init__(self, place: Path, directory: Path) -> None:
        self.python = place / "env" / "bin" / "python"
        self.directory = directory

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.runs("-m", "millstream", *words)

    def runs(self, *words: str) -> subprocess.CompletedProcess[str]:
        retained = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return subprocess.run(
            [self.python, *words],
            cwd=self.directory,
            env=retained,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


@pytest.fixture
def newcomer(installed: Path, tmp_path: Path) -> Newcomer:
    (tmp_path / "shop.yaml").write_text(PIPELINE)
    return Newcomer(installed, tmp_path)


def test_commands_that_need_spark_print_the_install_command(newcomer: Newcomer) -> None:
    for line in ("pipeline run shop.yaml --once", "demo"):
        done = newcomer.types(*line.split())
        assert done.returncode == 1
        assert done.stderr == (
            "error: Pipelines need Spark, which is not installed. Install it: pip install 'millstream[spark]'\n"
        )
        assert done.stdout == ""


def test_validation_without_spark_warns_what_is_missing(newcomer: Newcomer) -> None:
    done = newcomer.types("pipeline", "validate", "shop.yaml")
    assert (done.returncode, done.stdout) == (0, "shop: valid\n")
    assert "warning: Pipelines need Spark" in done.stderr
    assert newcomer.types("pipeline", "plan", "shop.yaml").returncode == 0


def test_first_program_of_the_readme_runs(newcomer: Newcomer) -> None:
    program = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert program is not None
    (newcomer.directory / "first.py").write_text(program[1])
    done = newcomer.runs("first.py")
    assert (done.returncode, done.stdout) == (0, program[2]), done.stderr


def test_help_points_at_nothing_that_is_not_installed(newcomer: Newcomer) -> None:
    output = newcomer.runs("-c", EVERY_HELP)
    assert output.returncode == 0, output.stderr
    assert "Delete dead letters permanently" in output.stdout
    assert "Seconds between two" in output.stdout
    assert not re.findall(r"docs/\S*|\w+\.md|make setup", output.stdout)


def test_pipelines_and_the_runner_load_without_any_extra(newcomer: Newcomer) -> None:
    done = newcomer.runs("-c", "from millstream.pipelines import Runner; import millstream.runner, millstream.testing")
    assert done.returncode == 0, done.stderr


def test_extras_of_other_commands_are_named_too(newcomer: Newcomer) -> None:
    assert "pip install 'millstream[verify]'" in newcomer.types("verify").stderr
    (newcomer.directory / "db.yaml").write_text(
        PIPELINE.replace(
            "{type: generator, config: {rows: 10}}", "{type: postgres, config: {dsn: 'host=x', tables: [t]}}"
        )
    )
    assert "pip install 'millstream[cdc]'" in newcomer.types("pipeline", "validate", "db.yaml").stderr
