"""An embedded broker that is asked as a cluster of three is: it refuses what touches keys of several slots, and each
node answers for its own keys. For storms in virtual time, which a real cluster cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream.broker import Link, Listener
from millstream.broker.keys import SLOTS, slot_of
from millstream.errors import ServerError
from millstream.wire import Args, Batch, Command

NODES = 3


def node_of(key: bytes | None) -> int:
    """The slots are shared as by ``ClusterSetup``; what has no key goes to the first node."""
    return slot_of(key) * NODES // SLOTS if key is not None else 0


class ClusterLink:
    """``broker.link = ClusterLink(broker.link)``, where ``broker.context.cluster`` is set too."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.features = replace(link.features, cluster=True)
        self.now: Callable[[Args], Any] | None = None

    async def call(self, command: Command) -> Any:
        await self._in_one_slot([command.args], command.key)
        return await self._link.call(command)

    async def call_many(self, batch: Batch) -> list[Any]:
        if batch.keys is None:
            await self._in_one_slot(batch.commands, batch.key)
        else:
            for words, key in zip(batch.commands, batch.keys, strict=True):
                await self._in_one_slot([words], key)
        return await self._link.call_many(batch)

    async def _in_one_slot(self, commands: Sequence[Args], key: bytes | None) -> None:
        """An AssertionError, not an error reply: a cluster would refuse it each time, so that no test shall hide it."""
        touched = {slot_of(one) for words in commands for one in await self._keys(words)}
        if touched and (key is None or touched != {slot_of(key)}):
            raise AssertionError(f"sent to the node of {key!r}, with keys of the slots {sorted(touched)}: {commands}")

    async def _keys(self, words: Args) -> Sequence[bytes]:
        try:
            found: Sequence[bytes] = await self._link.call(Command((b"COMMAND", b"GETKEYS", *words)))
        except ServerError:  # it has none
            return ()
        return found

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        return self._link.listen(patterns)

    async def close(self) -> None:
        await self._link.close()
