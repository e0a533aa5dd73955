"""The base of all chapters, and an async adapter of BlockingBroker, so that one suite tests both brokers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from millstream.broker import BlockingBroker, BlockingOnceWriter


class Chapter:
    """The base class of chapters. Subclasses need a fixture ``broker``."""

    @pytest.fixture
    def stream(self) -> str:
        """The name of a new stream."""
        return f"conformance:{uuid4().hex[:12]}"


class Unblocked:
    """The interface of Broker over a BlockingBroker: each call runs on a thread."""

    def __init__(self, broker: BlockingBroker) -> None:
        self.blocking = broker
        self.context = broker.context

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.blocking, name)
        if name in ("listen", "once_writer") or not callable(value):
            return value
        return partial(asyncio.to_thread, value)

    def once_writer(self, *args: Any, **kwargs: Any) -> Any:
        return _Writer(self.blocking.once_writer(*args, **kwargs))

    def listen(self, patterns: Any) -> Any:
        return _Listener(self.blocking.listen(patterns))

    async def close(self) -> None:
        await asyncio.to_thread(self.blocking.close)


class _Writer:
    def __init__(self, writer: BlockingOnceWriter) -> None:
        self._writer = writer

    @property
    def position(self) -> int:
        return self._writer.position

    async def append(self, entries: Any) -> Any:
        return await asyncio.to_thread(self._writer.append, entries)

    async def finish(self) -> None:
        await asyncio.to_thread(self._writer.finish)


class _Listener:
    def __init__(self, listener: Any) -> None:
        self._listener = listener

    async def __aenter__(self) -> _Listener:
        await asyncio.to_thread(self._listener.__enter__)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self._listener.__exit__, None, None, None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        messages = iter(self._listener)
        while True:
            yield await asyncio.to_thread(next, messages)


def signatures(broker: type) -> dict[str, Callable[..., Any]]:
    """The public operations of a broker by name, which must be equal for both brokers."""
    return {
        name: value
        for name, value in inspect.getmembers(broker, callable)
        if not name.startswith("_") and name not in ("run", "listen", "once_writer", "close")
    }
