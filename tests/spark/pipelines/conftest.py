"""The golden batches' own module is importable where the tests run, workers included."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
SOURCE = str(Path(__file__).parents[3] / "src")
# Spark's Python workers are separate processes, which find modules only through the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([HERE, SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
