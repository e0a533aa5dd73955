"""Ours and the peer take turns, so that a machine that slows down slows both; medians are reported."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def rate(count: int, work: Callable[[], object]) -> float:
    """``count`` things a second, for one run of ``work``."""
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


def interleaved(rounds: int, *sides: Callable[[], float]) -> tuple[float, ...]:
    """Runs every side once a round, and gives each side's median."""
    figures: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, collected in zip(sides, figures, strict=True):
            gc.collect()  # what others left behind is not to be cleared away in the time of this one
            collected.append(side())
    return tuple(statistics.median(collected) for collected in figures)
