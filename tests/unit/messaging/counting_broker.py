"""A fake broker with the three members of ``BrokerProtocol``, which counts operations."""

from __future__ import annotations

from collections import Counter
from typing import ParamSpec, TypeVar

from millstream import BrokerProtocol, open_broker
from millstream.broker import Context, OperationFunction
from millstream.errors import BrokerUnavailable

P = ParamSpec("P")
R = TypeVar("R")


class CountingBroker:
    """Counts operations, and fails the first calls of one operation like an unavailable server."""

    def __init__(self, inside: BrokerProtocol | None = None, *, refuses: str = "", times: int = 0) -> None:
        self._inside = inside or open_broker("local://counted")
        self._refuses = refuses
        self._times = times
        self.asked: Counter[str] = Counter()

    @property
    def context(self) -> Context:
        return self._inside.context

    @property
    def transport(self) -> object:
        return self

    async def run(self, step: OperationFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.asked[step.__name__] += 1
        if step.__name__ == self._refuses and self.asked[step.__name__] <= self._times:
            raise BrokerUnavailable("refused by a test")
        return await self._inside.run(step, *args, **kwargs)


def fits(broker: BrokerProtocol) -> BrokerProtocol:
    return broker


fits(CountingBroker())
