"""A publish takes few hops: a layer that only hands on is removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "count_hops.py"


def test_a_publish_in_this_process_takes_eighteen_hops_at_most() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    *hops, _ = done.stdout.splitlines()

    assert hops[0].endswith("Publisher.publish")
    assert hops[-1].endswith("Engine.execute")
    assert len(hops) <= 18, done.stdout
