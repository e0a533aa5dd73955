"""Tests of the tests: each fault that is planted into a copy of the sources makes one of the named tests fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.mutants import MUTANTS, SOURCE, Mutant

ROOT = Path(__file__).parents[2]
IN_FULL = int(os.environ.get("TRIALS", "2")) > 2
TRIED = MUTANTS if IN_FULL else MUTANTS[:3]
TESTS_FAILED = 1
"""The exit code of pytest for failed tests, unlike those for "all passed", "nothing was collected" and its own
errors."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mutant", TRIED, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(SOURCE.parent, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    mutant.plant(tmp_path / "src" / "millstream")
    done = run_tests(mutant, tmp_path / "src")
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.splitlines() if line.startswith("FAILED ")]
    print(f"| {mutant.name} | {failed[0] if failed else 'not noticed'} |")
    assert failed, done[-3000:]


def run_tests(mutant: Mutant, source: Path) -> str:
    """Runs the tests and returns their output. They and the processes that they start import the copy."""
    environment = {**os.environ, "PYTHONPATH": str(source), "TRIALS": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.noticed_by]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, TESTS_FAILED), f"no test was run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
