"""One meaning per word: what is measured of the house, and must hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_house.py"


def test_no_two_classes_share_a_name() -> None:
    """Of what is public, the kit of tests aside."""
    told = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True).stdout
    line, _, named = told.partition("class names used twice")[2].partition("\n")

    assert line.strip() == "0", f"find another word for one of them:\n{named}"
