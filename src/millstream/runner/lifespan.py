"""A router beside a web application: up and down with it, in one line.

``app = Starlette(routes=..., lifespan=lifespan(router))``, and the same with FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from millstream.messaging import Router
from millstream.model import milliseconds
from millstream.runner.target import CLOSE_TIMEOUT_S, RunTarget


def lifespan(
    *parts: Any, url: str | None = None, close_timeout_ms: int | None = None, close_timeout: float | None = None
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """What ``lifespan=`` of a Starlette or FastAPI application takes. ``parts`` are what ``millstream run`` takes.

    The application starts to serve when every topic is being read, and ends after what is in flight was handled, up to
    ``close_timeout_ms`` (30,000). A part that ends with an error while the application runs raises it when the
    application ends.
    """

    patience_s = milliseconds("close_timeout", close_timeout_ms, round(CLOSE_TIMEOUT_S * 1000), close_timeout) / 1000

    @asynccontextmanager
    async def up_and_down(app: Any) -> AsyncIterator[None]:
        found = parts[0] if len(parts) == 1 else list(parts)
        async with RunTarget("lifespan", found).opened(url, close_timeout=patience_s) as running:
            tasks = [asyncio.create_task(part.run(**_own_signals(part))) for part in running]
            try:
                while not all(getattr(part, "ready", True) for part in running):
                    if any(task.done() for task in tasks):
                        break
                    await asyncio.sleep(0.01)
                for task in tasks:
                    if task.done():
                        await task
                yield
            finally:
                await asyncio.gather(*(part.close() for part in running))
                await asyncio.gather(*tasks)

    return up_and_down


def _own_signals(part: object) -> dict[str, bool]:
    """Signals belong to the web server here."""
    return {"handle_signals": False} if isinstance(part, Router) else {}
