"""Several topics for one handler, by weight: who starts next when not all can.

Each topic is read as always; what may start is decided here. Of the starts, a topic that has something waiting gets its
share by weight, spread evenly: with 3 and 1, three of the first to one of the second, and none waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from millstream.errors import InvalidArgument


class WeightedTurns:
    """Whose turn it is. Pure. Every topic that waits earns its weight with each turn; the richest goes, and pays what
    all of them have earned."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0)

    def next(self, waiting: Iterable[str]) -> str:
        """One of those that wait. Of equals the heavier, then the one that was named first."""
        names = set(waiting)
        some = [name for name in self._weights if name in names]
        for name in some:
            self._credit[name] += self._weights[name]
        chosen = max(some, key=lambda name: (self._credit[name], self._weights[name]))
        self._credit[chosen] -= sum(self._weights[name] for name in some)
        for name in self._credit:
            if name not in names:
                self._credit[name] = 0  # nothing is saved up while nothing waits
        return chosen


class PriorityGate:
    """Lets ``limit`` handlers run at a time, of all topics together. Belongs to one event loop."""

    def __init__(self, weights: Mapping[str, int], limit: int) -> None:
        self.limit = limit
        self._turns = WeightedTurns(weights)
        self._free = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {name: deque() for name in weights}

    async def enter(self, topic: str) -> None:
        """Returns when a handler of this topic may run. Cancelled, nothing is taken."""
        if self._free > 0 and not any(self._waiting.values()):
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[topic].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # its turn had come in the same moment
            elif turn in self._waiting[topic]:
                self._waiting[topic].remove(turn)
            raise

    def leave(self) -> None:
        self._free += 1
        while self._free > 0:
            names = [name for name, turns in self._waiting.items() if turns]
            if not names:
                return
            turn = self._waiting[self._turns.next(names)].popleft()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


def check_weights(weights: Mapping[str, int]) -> None:
    """Raises InvalidArgument."""
    if not weights:
        raise InvalidArgument("topic", weights, "topics and their weights, such as {'urgent': 10, 'bulk': 1}")
    for name, weight in weights.items():
        if type(weight) is not int or not 1 <= weight <= 1_000_000:
            raise InvalidArgument("topic", {name: weight}, "a weight that is a whole number from 1 to 1,000,000")
