"""Reports writes to keys, by server-assisted client-side caching (CLIENT TRACKING, Redis 6 and newer).

One connection per node, with RESP3. A server remembers the keys that this connection has read, and reports the first
write to each of them; then the key must be read again to be watched. XREADGROUP, XACK, XCLAIM and XGROUP are no such
writes. This is a hint: reports are missed while a connection is broken or a slot moves, and some servers refuse the
command. Callers must also read keys that were not reported.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from millstream.broker.failures import code_of
from millstream.broker.transport.async_connection import AsyncConnection
from millstream.broker.transport.connecting import PING
from millstream.broker.transport.interface import Written
from millstream.broker.transport.routes import NoAnswer, NotSent
from millstream.broker.transport.targets import Node
from millstream.errors import BrokerClosed, MillstreamError
from millstream.wire import Args, ErrorReply

if TYPE_CHECKING:
    from millstream.broker.transport.redis_async import RedisTransport

log = logging.getLogger("millstream.broker")

TRACKING: tuple[Args, Args] = ((b"HELLO", b"3"), (b"CLIENT", b"TRACKING", b"ON"))
CHECK_S = 5.0
"""How often a connection is checked: a broken one reports nothing."""
RECONNECT_S = 1.0
REFUSED_S = 300.0
"""A node that refuses CLIENT TRACKING is not asked again for so long."""


class _WatchedNode:
    """The connection to one node, and the keys that it watches."""

    __slots__ = ("connection", "has_reported", "keys", "release")

    def __init__(self, connection: AsyncConnection, release: Callable[[], None]) -> None:
        self.connection = connection
        self.release = release
        """Closes the connection."""
        self.keys: dict[bytes, Written] = {}
        self.has_reported = False
        """The server has reported a write: its reports arrive here."""


class RedisKeyWatch:
    """Belongs to one event loop. ``run`` opens the connections; without them no key is watched."""

    def __init__(self, transport: RedisTransport) -> None:
        self._transport = transport
        self._nodes: dict[Node, _WatchedNode] = {}
        self._to_open: set[Node] = set()
        self._not_before_s: dict[Node, float] = {}
        """Nodes without a connection: when the next attempt may begin."""
        self._wanted = asyncio.Event()
        self._refusal_logged = False

    # --- called by readers --------------------------------------------------------------------------------------------

    async def watch(self, keys: Collection[bytes], written: Written) -> None:
        """Watches the keys as far as possible. ``written`` is called at the next write to a key, or when the key is
        not watched any more. A key that is watched already costs nothing."""
        shares: dict[Node, list[bytes]] = {}
        for key in keys:
            node = self._transport.node_of(key)
            if node is None:
                continue
            watched = self._nodes.get(node)
            if watched is None:
                self._open_later(node)
            elif key not in watched.keys:
                watched.keys[key] = written  # before the request: its reply and a report may arrive together
                shares.setdefault(node, []).append(key)
        if shares:
            await asyncio.gather(*(self._read(node, self._nodes[node], share) for node, share in shares.items()))

    def covers(self, key: bytes) -> bool:
        """Whether the next write to the key will be reported."""
        node = self._transport.node_of(key)
        watched = self._nodes.get(node) if node is not None else None
        return watched is not None and key in watched.keys

    def forget(self, key: bytes) -> None:
        for watched in self._nodes.values():
            watched.keys.pop(key, None)

    async def verify(self, keys: Iterable[bytes]) -> None:
        """Called with keys that were written without a report. If a node has never reported any write, its reports do
        not arrive (a proxy may drop them): its keys are not watched any more."""
        for node in {self._transport.node_of(key) for key in keys if self.covers(key)}:
            watched = self._nodes.get(node) if node is not None else None
            if node is None or watched is None or watched.has_reported:
                continue
            await self._check(node, watched)  # a report that was sent earlier arrives before the reply
            if not watched.has_reported:
                self._refuse(node, "it reported no write")

    async def _read(self, node: Node, watched: _WatchedNode, keys: list[bytes]) -> None:
        """XLEN makes the server remember the keys. A key that is not at this node is not watched."""
        try:
            replies = await watched.connection.exchange([(b"XLEN", key) for key in keys])
        except (NotSent, NoAnswer) as error:
            self._drop(node, watched, str(error))
            return
        except BaseException:  # cancelled: perhaps the server was not asked
            for key in keys:
                watched.keys.pop(key, None)
            raise
        for key, reply in zip(keys, replies, strict=True):
            if isinstance(reply, ErrorReply):
                watched.keys.pop(key, None)
                if code_of(reply) == "NOPERM":
                    self._refuse(node, str(reply))
                    return

    # --- connections --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Opens and checks connections until it is cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout(CHECK_S):
                        await self._wanted.wait()
                except TimeoutError:
                    await asyncio.gather(*(self._check(node, watched) for node, watched in self._nodes.items()))
                self._wanted.clear()
                nodes, self._to_open = self._to_open, set()
                await asyncio.gather(*(self._open(node) for node in nodes))
        finally:
            for node, watched in list(self._nodes.items()):
                self._drop(node, watched, "closed")

    def _open_later(self, node: Node) -> None:
        if time.monotonic() >= self._not_before_s.get(node, 0.0):
            self._to_open.add(node)
            self._wanted.set()

    async def _open(self, node: Node) -> None:
        self._not_before_s[node] = time.monotonic() + RECONNECT_S
        if node in self._nodes:
            return
        connections = self._transport.connections()
        try:
            connection = await connections.take(node)
        except BrokerClosed:
            raise
        except (NotSent, MillstreamError):
            return  # the node's reads report it
        watched = _WatchedNode(connection, partial(connections.discard, connection))
        connection.separate_pushes(lambda push: self._on_push(watched, push))
        try:
            replies = await connection.exchange(TRACKING)
        except (NotSent, NoAnswer):
            watched.release()
            return
        except BaseException:  # cancelled: nothing else would close the connection
            watched.release()
            raise
        self._nodes[node] = watched
        connection.on_lost = lambda: self._drop(node, watched, "lost")
        refusal = next((reply for reply in replies if isinstance(reply, ErrorReply)), None)
        if refusal is not None:
            self._refuse(node, str(refusal))
        elif not connection.alive:
            self._drop(node, watched, "lost")

    async def _check(self, node: Node, watched: _WatchedNode) -> None:
        try:
            await watched.connection.exchange([PING])
        except (NotSent, NoAnswer) as error:
            self._drop(node, watched, str(error))

    def _refuse(self, node: Node, reason: str) -> None:
        if not self._refusal_logged:
            self._refusal_logged = True
            log.warning("%s reports no writes (CLIENT TRACKING), so idle streams there are polled: %s", node, reason)
        self._not_before_s[node] = time.monotonic() + REFUSED_S
        if (watched := self._nodes.get(node)) is not None:
            self._drop(node, watched, reason)

    def _drop(self, node: Node, watched: _WatchedNode, reason: str) -> None:
        """The keys of this connection are not watched any more."""
        if self._nodes.get(node) is watched:
            del self._nodes[node]
        watched.connection.on_lost = None
        watched.release()
        log.debug("%s: writes are not reported any more: %s", node, reason)
        self._report(watched, list(watched.keys))

    def _on_push(self, watched: _WatchedNode, push: list[Any]) -> None:
        if len(push) == 2 and push[0] == b"invalidate":
            watched.has_reported = True
            self._report(watched, list(watched.keys) if push[1] is None else push[1])  # None: FLUSHALL

    def _report(self, watched: _WatchedNode, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (written := watched.keys.pop(key, None)) is not None:
                written(key)
