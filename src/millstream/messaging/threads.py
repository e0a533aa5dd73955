"""Handlers that are plain functions run in threads, so that they never hold the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Its result, or what it raised. A StopIteration becomes a RuntimeError, as in a coroutine: a future cannot carry
    it, and whoever waits for that future would wait for ever."""

    def run() -> R:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("the function raised StopIteration: give next() a default, or catch it") from error

    return await asyncio.to_thread(run)
