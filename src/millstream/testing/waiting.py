"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

DEFAULT_TIMEOUT_S = 30.0
"""Generous, because a busy machine may need seconds. Only a failing wait takes this long."""


def wait_until(
    predicate: Callable[[], Any], *, what: str = "the condition", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Any:
    """Calls the predicate until its result is true, and returns it. TimeoutError contains ``what``."""
    until = time.monotonic() + timeout_s
    while True:
        # Read the clock before the predicate, so that the predicate is called at least once after a long pause.
        late = time.monotonic() > until
        result = predicate()
        if result:
            return result
        if late:
            raise TimeoutError(f"timed out after {timeout_s:g} s waiting for {what}")
        time.sleep(0.005)


async def eventually(
    predicate: Callable[[], Any | Awaitable[Any]], *, what: str = "the condition", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Any:
    """``wait_until`` for an event loop; the predicate may be async."""
    until = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > until
        result = predicate()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if late:
            raise TimeoutError(f"timed out after {timeout_s:g} s waiting for {what}")
        await asyncio.sleep(0.005)
