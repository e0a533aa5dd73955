"""Batch handlers: messages that are handled together, and settled each for itself.

A message goes its usual way, through its middleware, up to here; then it waits for others, and all of them are given to
the handler as one list. What comes of the list comes of each of its messages: so acknowledgements, retries, burials and
outputs, order of keys and closing are those of single messages, and nothing else knows of batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from millstream.errors import InvalidArgument
from millstream.messaging.handler import Output
from millstream.messaging.message import Message

BatchCall = Callable[[list[Any], list[Message]], Awaitable[Any]]
"""From what the handler takes (bodies or messages) and the messages to what it returned."""


class Collector:
    """Gathers up to ``batch`` messages, and waits for them no longer than ``linger_ms`` after the first. Belongs to one
    handler and one event loop. Several batches may be under way: as many as ``max_in_flight`` has room for."""

    def __init__(self, call: BatchCall, batch: int, linger_ms: int) -> None:
        self._call = call
        self._batch = batch
        self._linger_s = linger_ms / 1000
        self._gathered: list[tuple[Message, Any, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def handle(self, message: Message, body: Any) -> Output:
        """What the handler returned for this message, or what it raised for all of them."""
        if message.times_delivered > 1:
            # It failed before, and perhaps took others with it: alone, only the one that is bad is buried.
            alone: Output = _one_each(await self._call([body], [message]), 1)[0]
            return alone
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        message.begun = False  # handed back while it waits here, it is not charged
        self._gathered.append((message, body, done))
        if len(self._gathered) >= self._batch:
            self._dispatch()
        elif self._timer is None:
            self._timer = loop.call_later(self._linger_s, self._dispatch)
        return await done  # type: ignore[no-any-return]  # checked by whoever publishes it

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Those whose worker has gone meanwhile (the subscription closes) are handed back by it.
        gathered, self._gathered = [one for one in self._gathered if not one[2].done()], []
        if gathered:
            task = asyncio.get_running_loop().create_task(self._run(gathered), name="millstream batch")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, gathered: Sequence[tuple[Message, Any, asyncio.Future[Any]]]) -> None:
        messages = [message for message, _, _ in gathered]
        for message in messages:
            message.begun = True
        task = asyncio.current_task()
        for _, _, done in gathered:
            # Nobody waits for any of them any more: the closing time is over, or a timeout has struck.
            done.add_done_callback(lambda _: task.cancel() if task and all(one[2].done() for one in gathered) else None)
        try:
            results = _one_each(await self._call([body for _, body, _ in gathered], messages), len(gathered))
        except BaseException as error:
            for _, _, done in gathered:
                if not done.done():
                    if isinstance(error, asyncio.CancelledError):
                        done.cancel()
                    else:
                        done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, done), result in zip(gathered, results, strict=True):
            if not done.done():
                done.set_result(result)


def _one_each(result: Any, count: int) -> Sequence[Any]:
    if result is None:
        return [None] * count
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)) or len(result) != count:
        allowed = f"None, or a list with one output for each of the {count} messages (None for those without)"
        raise InvalidArgument("batch handler's result", result, allowed)
    return result


def check_batch(batch: object, linger_ms: object, max_in_flight: int) -> None:
    """Raises InvalidArgument."""
    if type(batch) is not int or batch < 1:
        raise InvalidArgument("batch", batch, "a whole number of 1 or more")
    if batch > max_in_flight:
        raise InvalidArgument("batch", batch, f"at most max_in_flight ({max_in_flight}), or raise that too")
    if type(linger_ms) is not int or not 0 <= linger_ms <= 60_000:
        raise InvalidArgument("linger_ms", linger_ms, "a whole number of milliseconds, at most 60,000")
