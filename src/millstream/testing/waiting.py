"""Waiting for a predicate instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

WAITING_S = 30.0
"""A wait that succeeds costs what it takes; only a failure takes this long. A busy machine may take seconds."""


def wait_until(predicate: Callable[[], Any], *, what: str = "the condition", timeout_s: float = WAITING_S) -> Any:
    """The predicate's first true result. TimeoutError names what was waited for."""
    until = time.monotonic() + timeout_s
    while True:
        # Looked at before the predicate: whoever got no time until then still has one look.
        late = time.monotonic() > until
        result = predicate()
        if result:
            return result
        if late:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.005)


async def eventually(
    predicate: Callable[[], Any | Awaitable[Any]], *, what: str = "the condition", timeout_s: float = WAITING_S
) -> Any:
    """The same on an event loop; the predicate may be async."""
    until = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > until
        result = predicate()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if late:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        await asyncio.sleep(0.005)
