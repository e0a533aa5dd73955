"""An embedded broker that behaves like a cluster of three: it rejects commands on several slots, and each node replies
only for its own keys. For random faults in virtual time, which a real cluster cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream.broker import Listener, Transport
from millstream.broker.keys import SLOTS, slot_of
from millstream.errors import ServerError
from millstream.wire import Args, Batch, Command

NODES = 3


def node_of(key: bytes | None) -> int:
    """The slots are shared as by ``ClusterSetup``; what has no key goes to the first node."""
    return slot_of(key) * NODES // SLOTS if key is not None else 0


class ClusterTransport:
    """``broker.transport = ClusterTransport(broker.transport)``, where ``broker.context.cluster`` is set too."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.features = replace(transport.features, cluster=True)
        self.now: Callable[[Args], Any] | None = None

    async def call(self, command: Command) -> Any:
        await self._in_one_slot([command.args], command.key)
        return await self._transport.call(command)

    async def call_many(self, batch: Batch) -> list[Any]:
        if batch.keys is None:
            await self._in_one_slot(batch.commands, batch.key)
        else:
            for words, key in zip(batch.commands, batch.keys, strict=True):
                await self._in_one_slot([words], key)
        return await self._transport.call_many(batch)

    async def _in_one_slot(self, commands: Sequence[Args], key: bytes | None) -> None:
        """An AssertionError, not an error reply: a cluster would refuse it each time, so that no test shall hide it."""
        touched = {slot_of(one) for words in commands for one in await self._keys(words)}
        if touched and (key is None or touched != {slot_of(key)}):
            raise AssertionError(f"sent to the node of {key!r}, with keys of the slots {sorted(touched)}: {commands}")

    async def _keys(self, words: Args) -> Sequence[bytes]:
        try:
            found: Sequence[bytes] = await self._transport.call(Command((b"COMMAND", b"GETKEYS", *words)))
        except ServerError:  # it has none
            return ()
        return found

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        return self._transport.listen(patterns)

    async def close(self) -> None:
        await self._transport.close()
