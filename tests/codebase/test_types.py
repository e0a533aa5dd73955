"""A type checker reports wrong uses of the public names, and accepts correct ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRONG = ROOT / "tests" / "types" / "wrong_uses.py"
FAKE = ROOT / "tests" / "unit" / "messaging" / "counting_broker.py"


def test_type_checker_reports_every_wrong_use_and_accepts_a_custom_broker() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", WRONG, FAKE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    reported = re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    places = {int(line) for file, line, _ in reported if file.endswith(WRONG.name)}
    wrong = {number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) > 10
    assert places == wrong, done.stdout + done.stderr
    assert not [item for item in reported if item[0].endswith(FAKE.name)], done.stdout
