"""Time as a parameter: components that act hold a clock; functions that decide receive ``now_ms``."""

from __future__ import annotations

import time
from typing import Protocol


def monotonic_ms() -> float:
    """Milliseconds of a clock that never goes back, for measuring durations."""
    return time.monotonic() * 1000


_SUSPEND_AWARE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def suspend_aware_s() -> float:
    """Seconds of a clock that never goes back and also counts while the machine is suspended.

    For leases, which a server measures during the suspension too. ``time.monotonic`` stops during a suspension on
    Linux. Where CLOCK_BOOTTIME does not exist, both clocks are the same."""
    return time.clock_gettime(_SUSPEND_AWARE_CLOCK)


class Clock(Protocol):
    """Wall-clock and monotonic time. Tests pass a ``ManualClock``."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 of the wall clock, which may jump."""

    def monotonic_ms(self) -> int:
        """Milliseconds of a clock that never goes back, for measuring durations."""


class SystemClock:
    """The clock of the operating system."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class ManualClock:
    """A clock that moves only when ``advance`` or ``set_wall`` is called, for tests and simulations."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        self._now_ms += ms
        self._monotonic_ms += ms

    def set_wall(self, now_ms: int) -> None:
        """Moves only the wall clock, also backwards, as an administrator or NTP does."""
        self._now_ms = now_ms
