"""The Python versions that the package names are those that `make pythons` tests."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pythons.sh"


def test_classifiers_are_the_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [item.rpartition(" ")[2] for item in project["classifiers"] if re.search(r":: 3\.\d+$", item)]
    tested = re.search(r"VERSIONS:-([\d. ]+)}", SCRIPT.read_text())
    assert tested is not None
    assert tested[1].split() == named
    assert project["requires-python"] == f">={named[0]}"


def test_absent_interpreter_is_skipped_with_a_reason(tmp_path: Path) -> None:
    env = {**os.environ, "VERSIONS": "3.99", "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stdout == "Python 3.99: skipped, no interpreter on the path or under pyenv\n"


def test_single_tests_that_are_run_exist() -> None:
    named = re.findall(r"(tests/\S+\.py)::(\w+)", SCRIPT.read_text())
    assert named
    assert not [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert " -k test_" not in SCRIPT.read_text(), "a renamed test would select nothing"
