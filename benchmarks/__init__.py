"""Benchmarks: ours and a peer in the same run, interleaved, several rounds, the median reported, with a goal.

Each suite is a module with ``run(rounds, progress)``.
"""

from __future__ import annotations

import gc
import operator
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

Progress = Callable[[str], None]
"""Called with a description of the current measurement."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    goal: str = ""
    """Such as ">= 3.5 x" (of the ratio) or "<= 150" (of the value)."""

    @property
    def ratio(self) -> float | None:
        """Our value divided by the peer's; None without a peer."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal was reached; None where there is none."""
        if not self.goal:
            return None
        sign, number, *of_ratio = self.goal.split()
        measured = self.ratio if of_ratio else self.value
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[sign]
        return measured is not None and bool(compare(measured, float(number)))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": None if self.peer_value is None else round(self.peer_value, 4),
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "goal": self.goal,
        }


def rate(count: int, work: Callable[[], object]) -> float:
    """``count`` divided by the seconds that one run of ``work`` takes."""
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


def interleaved(rounds: int, *sides: Callable[[], float]) -> tuple[float, ...]:
    """Runs every side once a round, and gives each side's median."""
    figures: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, collected in zip(sides, figures, strict=True):
            gc.collect()  # garbage of the previous side is collected before this side is timed
            collected.append(side())
    return tuple(statistics.median(collected) for collected in figures)


_PACKAGES = ("millstream", "redis", "hiredis", "pyspark", "pyarrow", "fakeredis", "faststream")


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "redis_server": _redis_server_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _redis_server_version() -> str | None:
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    words = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return next((word[2:] for word in words if word.startswith("v=")), None)
