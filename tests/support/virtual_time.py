"""An event loop in which waiting takes no time: when no callback is ready, its clock advances to the next timer.

For tests of schedules: a minute of waiting passes at once, exact to the millisecond, also on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(self.now * 1e9)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("every task waits, and no timer is scheduled")
        if not ready and timeout:
            self.now += timeout
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, for coroutines that use neither sockets nor threads. ``time.monotonic`` is the loop's
    clock."""
    selector = _Jumping()
    with (
        mock.patch.object(time, "monotonic", selector.time),
        mock.patch.object(time, "monotonic_ns", selector.time_ns),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        return runner.run(main)
