"""Which handler is running: told by the router, for middleware that reports or marks messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class RunningHandler(NamedTuple):
    handler: str
    topic: str
    group: str | None
    consumer: str | None


_NOBODY = RunningHandler("", "", None, None)
_current: ContextVar[RunningHandler] = ContextVar("millstream_handler", default=_NOBODY)


def current_handler() -> RunningHandler:
    """The handler in whose call this code runs; empty names outside of one."""
    return _current.get()


@contextmanager
def running(handler: RunningHandler) -> Iterator[None]:
    token = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(token)
