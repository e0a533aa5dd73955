"""Time as a parameter: whoever acts holds a clock, whoever decides is given ``now_ms``."""

from __future__ import annotations

import time
from typing import Protocol


def monotonic_ms() -> float:
    """Milliseconds that only ever grow, for a loop that measures its own pace."""
    return time.monotonic() * 1000


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970, as the wall clock has them; it may jump."""

    def monotonic_ms(self) -> int:
        """Milliseconds that only ever grow, for measuring how long something took or may still take."""


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class ManualClock:
    """A clock that moves when it is told to: for tests and simulations."""

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
        """Moves the wall clock alone, as an administrator or NTP does; backwards too."""
        self._now_ms = now_ms
