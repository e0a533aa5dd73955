"""An embedded broker that behaves like a cluster of three: it rejects commands on several slots, and each node replies
only for its own keys. It reports writes to watched keys. For random faults in virtual time, which a real cluster cannot
follow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Sequence
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
        self.watches: list[SimulatedKeyWatch] = []

    async def call(self, command: Command) -> Any:
        await self._in_one_slot([command.args], command.key)
        reply = await self._transport.call(command)
        await self._report_writes()
        return reply

    async def call_many(self, batch: Batch) -> list[Any]:
        if batch.keys is None:
            await self._in_one_slot(batch.commands, batch.key)
        else:
            for words, key in zip(batch.commands, batch.keys, strict=True):
                await self._in_one_slot([words], key)
        replies = await self._transport.call_many(batch)
        await self._report_writes()
        return replies

    async def state_of(self, key: bytes) -> bytes | None:
        """The id of the last entry that the stream has had; None if there is no stream."""
        try:
            info = await self._transport.call(Command((b"XINFO", b"STREAM", key)))
        except ServerError:
            return None
        return bytes(info[info.index(b"last-generated-id") + 1])

    async def _report_writes(self) -> None:
        for watch in self.watches:
            for key, state in list(watch.armed.items()):
                if await self.state_of(key) != state:
                    watch.report(key)

    async def _in_one_slot(self, commands: Sequence[Args], key: bytes | None) -> None:
        """An AssertionError, not an error reply: a cluster would refuse it each time, so that no test shall hide it."""
        touched = {slot_of(item) for words in commands for item in await self._keys(words)}
        if touched and (key is None or touched != {slot_of(key)}):
            raise AssertionError(f"sent to the node of {key!r}, with keys of the slots {sorted(touched)}: {commands}")

    async def _keys(self, words: Args) -> Sequence[bytes]:
        try:
            result: Sequence[bytes] = await self._transport.call(Command((b"COMMAND", b"GETKEYS", *words)))
        except ServerError:  # it has none
            return ()
        return result

    def listen(self, patterns: Sequence[bytes]) -> Listener:
        return self._transport.listen(patterns)

    async def close(self) -> None:
        await self._transport.close()


class SimulatedKeyWatch:
    """Reports each first write after a moment. Some reports are lost: the key then counts as watched all the same."""

    def __init__(self, link: ClusterTransport, chance: random.Random, *, lost: float = 0.0) -> None:
        self.armed: dict[bytes, bytes | None] = {}
        """The keys whose next write the server reports, and the state of each."""
        self._link = link
        self._chance = chance
        self._lost = lost
        self._written: dict[bytes, Callable[[bytes], None]] = {}
        link.watches.append(self)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def watch(self, keys: Collection[bytes], written: Callable[[bytes], None]) -> None:
        unwatched = [key for key in keys if key not in self._written]
        self._written.update(dict.fromkeys(unwatched, written))
        await self._moment()
        for key in unwatched:
            self.armed[key] = await self._link.state_of(key)
        await self._moment()

    def covers(self, key: bytes) -> bool:
        return key in self._written

    def forget(self, key: bytes) -> None:
        self._written.pop(key, None)

    async def verify(self, keys: Iterable[bytes]) -> None:
        """Its reports arrive sometimes, so it stays trusted."""

    def report(self, key: bytes) -> None:
        del self.armed[key]
        if self._chance.random() >= self._lost:
            asyncio.get_running_loop().call_later(self._chance.random() * 0.02, self._arrives, key)

    def _arrives(self, key: bytes) -> None:
        written = self._written.pop(key, None)
        if written is not None:
            written(key)

    async def _moment(self) -> None:
        await asyncio.sleep(self._chance.random() * 0.02)
