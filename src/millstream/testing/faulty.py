"""A link that fails when it is told to: for trying out what a program does when its broker does not answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from millstream.broker import BlockingLink, BlockingListener, Link, Listener
from millstream.errors import BrokerUnavailable
from millstream.wire import Args, Batch, Command


class Fault(NamedTuple):
    """What happens to one call."""

    before: Exception | None = None
    """Raised instead of calling: nothing was executed."""
    after: Exception | None = None
    """Raised although it was executed: the answer is lost."""
    delay_s: float = 0.0

    @classmethod
    def refused(cls) -> Fault:
        """The server could not be reached."""
        return cls(before=BrokerUnavailable("planted: connection refused"))

    @classmethod
    def answer_lost(cls) -> Fault:
        """The command was executed, and the connection broke before the answer came."""
        return cls(after=BrokerUnavailable("planted: connection reset", may_have_been_applied=True))


NO_FAULT = Fault()
Choice = Callable[[Command | Batch], Fault | None]


class _Plan:
    """Faults by number (a list, used up in order) or by choice (a function of the request)."""

    def __init__(self, faults: Iterable[Fault | None] | Choice) -> None:
        self._choose: Choice | None = faults if callable(faults) else None
        self._queue: deque[Fault | None] = deque() if callable(faults) else deque(faults)
        self.requests: list[Command | Batch] = []
        """Everything that was asked, in order."""

    def next(self, request: Command | Batch) -> Fault:
        self.requests.append(request)
        if self._choose is not None:
            return self._choose(request) or NO_FAULT
        return (self._queue.popleft() if self._queue else None) or NO_FAULT


class FaultyLink:
    """``broker.link = FaultyLink(broker.link, [None, Fault.refused()])``: the second call fails."""

    def __init__(self, link: Link, faults: Iterable[Fault | None] | Choice = ()) -> None:
        self._link = link
        self.now: Callable[[Args], Any] | None = None
        self.features = link.features
        self.plan = _Plan(faults)

    async def call(self, command: Command) -> Any:
        fault = await self._before(command)
        return _after(fault, await self._link.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        fault = await self._before(batch)
        replies: list[Any] = _after(fault, await self._link.call_many(batch))
        return replies

    async def _before(self, request: Command | Batch) -> Fault:
        fault = self.plan.next(request)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.before is not None:
            raise fault.before
        return fault

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        return self._link.listen(patterns)

    async def close(self) -> None:
        await self._link.close()


class FaultyBlockingLink:
    """The same for threads."""

    def __init__(self, link: BlockingLink, faults: Iterable[Fault | None] | Choice = ()) -> None:
        self._link = link
        self.features = link.features
        self.now: Callable[[Args], Any] | None = None
        self.plan = _Plan(faults)

    def call(self, command: Command) -> Any:
        fault = self._before(command)
        return _after(fault, self._link.call(command))

    def call_many(self, batch: Batch) -> list[Any]:
        fault = self._before(batch)
        replies: list[Any] = _after(fault, self._link.call_many(batch))
        return replies

    def _before(self, request: Command | Batch) -> Fault:
        fault = self.plan.next(request)
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.before is not None:
            raise fault.before
        return fault

    def listen(self, patterns: Sequence[bytes]) -> BlockingListener:
        return self._link.listen(patterns)

    def close(self) -> None:
        self._link.close()


def _after(fault: Fault, reply: Any) -> Any:
    if fault.after is not None:
        raise fault.after
    return reply
