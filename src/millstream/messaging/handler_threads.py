"""Threads for sync handlers and sync dependencies.

They do not share asyncio's default executor: that has ``min(32, cores + 4)`` threads and also resolves host names, so
busy handlers would keep this process from reconnecting to its server. There is one thread for each call that may run.
A message takes its thread before its delivery counts and before a ``timeout`` starts: waiting for a thread costs
nothing. The threads are daemons: a handler that never returns does not keep the process alive after the close.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

MAX_HANDLER_THREADS = 1_000
"""Sync handlers that run at a time, of all topics of an event loop together. ``max_in_flight`` limits each topic."""

R = TypeVar("R")

_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, HandlerThreads] = WeakKeyDictionary()


def handler_threads() -> HandlerThreads:
    """The threads of the running event loop."""
    loop = asyncio.get_running_loop()
    threads = _by_loop.get(loop)
    if threads is None:
        threads = _by_loop[loop] = HandlerThreads(MAX_HANDLER_THREADS)
    return threads


_Call = tuple[Future[Any], Callable[[], Any]]


class _DaemonThreads:
    """As a ThreadPoolExecutor, which the interpreter waits for when it exits. For one event loop's thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = Semaphore(0)

    def submit(self, function: Callable[[], R]) -> Future[R]:
        future: Future[R] = Future()
        self._calls.put((future, function))
        if not self._idle.acquire(blocking=False) and self._count < self._limit:
            self._count += 1
            # Not a method: a thread must not keep this object alive.
            name = f"millstream-handler_{self._count}"
            Thread(target=_run_calls, args=(self._calls, self._idle), name=name, daemon=True).start()
        return future

    def __del__(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)


def _run_calls(calls: SimpleQueue[_Call | None], idle: Semaphore) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # raised in the task that waits for the call
                future.set_exception(error)
        del call, future, function  # while it waits, the thread keeps no message alive
        idle.release()


class HandlerThreads:
    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._threads = _DaemonThreads(limit)

    async def acquire(self) -> None:
        """Returns when a thread is free for one message. Cancelled, nothing is taken."""
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the thread became free in the same moment
            raise

    def release(self) -> None:
        self._free += 1
        while self._free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    async def run(self, function: Callable[[], R]) -> R:
        future: Future[R] = self._threads.submit(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.done():
                self._keep_until_done(future)
            raise

    def _keep_until_done(self, future: Future[Any]) -> None:
        """A thread cannot be cancelled: it stays taken until the function returns."""
        loop = asyncio.get_running_loop()
        self._free -= 1

        def ended(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the event loop is closed: no task waits for a thread
                loop.call_soon_threadsafe(self.release)

        future.add_done_callback(ended)
