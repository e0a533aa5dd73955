"""What ``async for`` goes through. Leaving the loop, or losing the object, hands back what was not yielded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, Self

from millstream.messaging.message import Message


class MessageSource(Protocol):
    abandoned: bool
    """Nobody listens any more; it will be closed in a moment."""

    async def next_message(self) -> Message | None: ...

    async def close(self, timeout_s: float) -> None: ...


class Messages:
    """An async iterator over one topic. It may be gone through again after a ``break``, while it is kept."""

    def __init__(
        self,
        source: MessageSource | None,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._source = source
        self._begin = begin
        self._end = end
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        if self._source is None:
            raise StopAsyncIteration
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            await self._begin()
        try:
            message = await self._source.next_message()
        except asyncio.CancelledError:
            raise
        except BaseException:
            await self.aclose()
            raise
        if message is None:
            await self.aclose()
            raise StopAsyncIteration
        return message

    async def aclose(self) -> None:
        """Hands back what was not yielded, and waits for what was, as ``Subscriber.close`` does. Idempotent."""
        source, self._source = self._source, None
        if source is not None:
            try:
                await source.close(self._timeout_s)
            finally:
                self._end()

    def __del__(self) -> None:
        # After a ``break`` nobody holds this any more: reading must not go on for nobody.
        source, loop = self._source, self._loop
        if source is None or loop is None or loop.is_closed():
            return
        source.abandoned = True
        end = self._end

        async def close() -> None:
            try:
                await source.close(self._timeout_s)
            finally:
                end()

        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(close()))
