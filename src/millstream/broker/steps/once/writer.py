"""Writers of ``append_once`` that keep their position and digest, for event loops and for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from millstream.broker.operations.arguments import Fields
from millstream.broker.steps.once.call import Once
from millstream.broker.steps.once.digest import Appended

if TYPE_CHECKING:
    from millstream.broker.blocking_broker import BlockingBroker
    from millstream.broker.broker import Broker


class OnceWriter:
    """One writer of one partition, from row 0 on: keeps its position and its rolling digest.

    ``append`` may be called as often as needed, with chunks of any size; ``finish`` makes sure that a replay did not
    bring fewer rows than are stored. Not for several tasks at once: rows have an order.
    """

    def __init__(self, broker: Broker, once: Once) -> None:
        self._broker = broker
        self._once = once

    @property
    def position(self) -> int:
        """Rows appended or skipped so far."""
        return self._once.position

    async def append(self, entries: Sequence[Fields]) -> Appended:
        return await self._broker.run(self._once.append, entries)

    async def finish(self) -> None:
        await self._broker.run(self._once.finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finishes, unless an error is on its way."""
        if kind is None:
            await self.finish()


class BlockingOnceWriter:
    """The same for threads."""

    def __init__(self, broker: BlockingBroker, once: Once) -> None:
        self._broker = broker
        self._once = once

    @property
    def position(self) -> int:
        return self._once.position

    def append(self, entries: Sequence[Fields]) -> Appended:
        return self._broker.run(self._once.append, entries)

    def finish(self) -> None:
        self._broker.run(self._once.finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish()
