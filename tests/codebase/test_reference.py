"""Pages that are made from the code are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_generated_pages_are_up_to_date() -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
