"""The link to Redis for event loops: a shared, pipelined connection for what answers at once, own ones to wait on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.broker.context import Limits
from millstream.broker.links.async_connection import AsyncConnection
from millstream.broker.links.connecting import PING, ask_about_tls, check_first_answer, open_stream, why_not_connected
from millstream.broker.links.link import Features
from millstream.broker.links.listeners import RedisListener
from millstream.broker.links.retry_policy import RetryPolicy, unforeseen
from millstream.broker.links.routes import Exchange, Exchanges, NoAnswer, NotSent, route_to
from millstream.broker.links.sentinel_watch import SentinelWatch
from millstream.broker.links.targets import Node, Target
from millstream.errors import BrokerClosed, MillstreamError
from millstream.model import Clock, Observer
from millstream.wire import Args, Batch, Command

R = TypeVar("R")


class _Connections:
    """The connections of one event loop in one process; they are of no use to any other."""

    def __init__(
        self, target: Target, limits: Limits, loop: asyncio.AbstractEventLoop, forget: Callable[[], None]
    ) -> None:
        self._target = target
        self._limits = limits
        self.loop = loop
        self._shared: dict[Node, AsyncConnection] = {}
        self._opening: dict[Node, asyncio.Lock] = {}
        self._spare: dict[Node, list[AsyncConnection]] = {}
        self._out: dict[AsyncConnection, Node] = {}
        self._answered: set[Node] = set()
        """Nodes that have answered, or that were asked about TLS once."""
        self._forget_primary = forget
        self._sentinels = SentinelWatch(target, self.open, self._switched) if target.kind == "sentinel" else None

    async def exchange(self, asked: Exchange) -> list[Any]:
        if self._sentinels is not None:
            self._sentinels.start()
        if not asked.alone:
            connection = self._shared.get(asked.node)
            if connection is None or not connection.in_order() or connection.idle_s * 1000 > self._limits.idle_check_ms:
                connection = await self._share(asked.node)
            return await connection.exchange(asked.requests, asked.wait_ms, asked.whole, asked.reading)
        connection = await self.take(asked.node)
        try:
            if asked.on_wait is not None:
                asked.on_wait(await connection.client_id())
            replies = await connection.exchange(asked.requests, asked.wait_ms, asked.whole, asked.reading)
        except BaseException:
            # Cancelled or broken: a reply may still be on its way, and must not meet the next one who waits here.
            self.discard(connection)
            raise
        self.give_back(asked.node, connection)
        return replies

    async def _share(self, node: Node) -> AsyncConnection:
        """The node's shared connection; one task opens it while the others wait."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            connection = self._shared.get(node)
            if connection is not None:
                if await self._well(connection):
                    return connection
                connection.close("the server closed the connection")
            connection = self._shared[node] = await self.open(node)
            return connection

    async def take(self, node: Node) -> AsyncConnection:
        """A connection for one task alone."""
        spare = self._spare.get(node, [])
        while spare:
            connection = spare.pop()
            if await self._well(connection):
                self._out[connection] = node
                return connection
            connection.close()
        connection = await self.open(node)
        self._out[connection] = node
        return connection

    async def _well(self, connection: AsyncConnection) -> bool:
        """Whether a command may be trusted to it. After a long silence only an answer proves that."""
        if connection.alive and connection.idle_s * 1000 > self._limits.idle_check_ms:
            try:
                await connection.exchange([PING])
            except (NotSent, NoAnswer):
                return False
        return connection.in_order()

    def give_back(self, node: Node, connection: AsyncConnection) -> None:
        self._out.pop(connection, None)
        spare = self._spare.setdefault(node, [])
        if connection.alive and len(spare) < self._limits.max_idle_connections:
            spare.append(connection)
        else:
            connection.close()

    def discard(self, connection: AsyncConnection) -> None:
        self._out.pop(connection, None)
        connection.close("given up")

    async def open(self, node: Node) -> AsyncConnection:
        """A new connection whose server has answered. Raises NotSent, or what no second try will mend."""
        try:
            connection = await self._open(node)
        except NotSent as error:
            if node not in self._answered:
                self._answered.add(node)
                if (trouble := await asyncio.to_thread(ask_about_tls, self._target, node)) is not None:
                    raise trouble from error
            raise
        self._answered.add(node)
        return connection

    async def _open(self, node: Node) -> AsyncConnection:
        try:
            async with asyncio.timeout(self._limits.connect_ms / 1000):
                connection = AsyncConnection(*await open_stream(self._target, node, self._limits), self._limits)
                try:
                    (reply,) = await connection.exchange([PING])
                    check_first_answer(self._target, node, reply)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError as error:
            raise NotSent(f"{node}: no connection within {self._limits.connect_ms} ms") from error
        except (NotSent, MillstreamError):
            raise
        except Exception as error:
            raise why_not_connected(self._target, node, error) from error
        return connection

    def _switched(self, primary: Node) -> None:
        """There is a new primary: whatever waits for the old one waits in vain."""
        self._forget_primary()
        for node, connection in self._all():
            if node.kind == "data" and node != primary:
                connection.close(f"{primary} is the primary now")

    def _all(self) -> list[tuple[Node, AsyncConnection]]:
        spare = [(node, connection) for node, many in self._spare.items() for connection in many]
        return [*self._shared.items(), *spare, *((node, connection) for connection, node in self._out.items())]

    def close(self) -> None:
        if self._sentinels is not None:
            self._sentinels.close()
        for _, connection in self._all():
            connection.close()
        self._shared.clear()
        self._spare.clear()
        self._out.clear()


class RedisLink:
    """Thread-safe: every event loop has connections of its own. Fork-safe: a child makes new ones."""

    def __init__(self, target: Target, *, limits: Limits, clock: Clock, deadline_ms: int, observer: Observer) -> None:
        self.features = Features(cluster=target.kind == "cluster")
        self.now: Callable[[Args], Any] | None = None
        self.target = target
        self._limits = limits
        self._retry_policy = RetryPolicy(route_to(target), clock, deadline_ms, observer)
        self._observer = observer
        self._pid = os.getpid()
        self._by_loop: dict[int, _Connections] = {}
        self._abandoned: list[Any] = []
        self._closed = False

    async def call(self, command: Command) -> Any:
        return await self._run(self._retry_policy.call(command))

    async def call_many(self, batch: Batch) -> list[Any]:
        if not batch.commands and batch.after is None:
            return []
        return await self._run(self._retry_policy.call_many(batch))

    def node_of(self, key: bytes) -> Node | None:
        """Which node has the key, as far as is known; nobody is asked."""
        return self._retry_policy.route.known_node(key)

    def listen(self, patterns: Any) -> RedisListener:
        return RedisListener(self, tuple(patterns), self._limits, self._observer)

    async def _run(self, exchanges: Exchanges[R]) -> R:
        connections = self.connections()
        try:
            step = exchanges.send(None)
            while True:
                try:
                    result: list[Any] | None = None
                    if type(step) is Exchange:
                        result = await connections.exchange(step)
                    else:
                        await asyncio.sleep(step.seconds)  # type: ignore[union-attr]  # a pause
                except (NotSent, NoAnswer, MillstreamError) as trouble:
                    if self._closed:
                        raise closed() from trouble
                    step = exchanges.throw(trouble)
                else:
                    step = exchanges.send(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except MillstreamError:
            raise
        except Exception as error:
            raise unforeseen(error) from error
        finally:
            exchanges.close()

    def connections(self) -> _Connections:
        """This loop's connections."""
        if self._closed:
            raise closed()
        if os.getpid() != self._pid:
            self._after_fork()
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(id(loop))
        if connections is None or connections.loop is not loop:
            self._by_loop = {key: one for key, one in self._by_loop.items() if not one.loop.is_closed()}
            connections = self._by_loop[id(loop)] = _Connections(
                self.target, self._limits, loop, self._retry_policy.route.forget
            )
        return connections

    async def primaries(self) -> list[Node]:
        return await self._run(self._retry_policy.route.primaries())

    async def open_own(self, node: Node) -> AsyncConnection:
        """A connection outside the stock, for a listener."""
        return await self.connections().open(node)

    def _after_fork(self) -> None:
        # The parent's sockets and its selector are shared with this child: closing, or even collecting, a transport
        # here would take it out of the parent's selector. So the child keeps them and never touches them.
        self._abandoned.append(self._by_loop)
        self._by_loop = {}
        self._pid = os.getpid()

    async def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            return
        here = asyncio.get_running_loop()
        for connections in list(self._by_loop.values()):
            if connections.loop is here:
                connections.close()
            elif not connections.loop.is_closed():
                connections.loop.call_soon_threadsafe(connections.close)
        self._by_loop.clear()


def closed() -> BrokerClosed:
    return BrokerClosed("this broker was closed. Open another one with open_broker(url).")
