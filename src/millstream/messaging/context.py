"""Which handler is running: told by the router, for middleware that reports or marks messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple


class RunningHandler(NamedTuple):
    handler: str
    topic: str
    group: str | None
    consumer: str | None
    owner: object = None
    """The router that runs it."""


_NOBODY = RunningHandler("", "", None, None)
_current: ContextVar[RunningHandler] = ContextVar("millstream_handler", default=_NOBODY)


def current_handler() -> RunningHandler:
    """The handler in whose call this code runs; empty names outside of one."""
    return _current.get()


def begin(handler: RunningHandler) -> Token[RunningHandler]:
    return _current.set(handler)


def end(token: Token[RunningHandler]) -> None:
    _current.reset(token)


@contextmanager
def running(handler: RunningHandler) -> Iterator[None]:
    token = begin(handler)
    try:
        yield
    finally:
        end(token)
