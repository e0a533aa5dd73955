"""The transport to Redis for event loops: one shared, pipelined connection per node, and extra ones for blocking
commands.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.broker.context import Limits
from millstream.broker.transport.async_connection import AsyncConnection
from millstream.broker.transport.connecting import (
    PING,
    ask_about_tls,
    check_first_answer,
    open_stream,
    why_not_connected,
)
from millstream.broker.transport.interface import Features
from millstream.broker.transport.key_watch import RedisKeyWatch
from millstream.broker.transport.listeners import RedisListener
from millstream.broker.transport.retry_policy import RetryPolicy, unexpected_error
from millstream.broker.transport.routes import Exchange, Exchanges, NoAnswer, NotSent, route_to
from millstream.broker.transport.sentinel_watch import SentinelWatch
from millstream.broker.transport.targets import Node, Target
from millstream.errors import BrokerClosed, MillstreamError
from millstream.model import Clock, Observer, quiet
from millstream.wire import Args, Batch, Command

if TYPE_CHECKING:
    from millstream.broker.transport.redis_blocking import BlockingRedisTransport

R = TypeVar("R")


class _Connections:
    """The connections of one event loop in one process, which only that loop can use."""

    def __init__(
        self, target: Target, limits: Limits, loop: asyncio.AbstractEventLoop, forget: Callable[[], None]
    ) -> None:
        self._target = target
        self._limits = limits
        self.loop = loop
        self._shared: dict[Node, AsyncConnection] = {}
        self._opening: dict[Node, asyncio.Lock] = {}
        self._spare: dict[Node, list[AsyncConnection]] = {}
        self._busy: dict[AsyncConnection, Node] = {}
        self._closed = False
        self._answered: set[Node] = set()
        """Nodes that have replied, or whose TLS was checked once."""
        self._forget_primary = forget
        self._sentinels = SentinelWatch(target, self.open, self._on_new_primary) if target.kind == "sentinel" else None

    async def exchange(self, exchange: Exchange) -> list[Any]:
        if self._sentinels is not None:
            self._sentinels.start()
        if not exchange.alone:
            connection = self._shared.get(exchange.node)
            if (
                connection is None
                or not connection.is_usable()
                or connection.idle_s * 1000 > self._limits.idle_check_ms
            ):
                connection = await self._share(exchange.node)
            return await connection.exchange(exchange.requests, exchange.wait_ms, exchange.whole, exchange.reading)
        connection = await self.take(exchange.node)
        try:
            if exchange.on_wait is not None:
                exchange.on_wait(await connection.client_id())
            replies = await connection.exchange(exchange.requests, exchange.wait_ms, exchange.whole, exchange.reading)
        except BaseException:
            # Cancelled or broken: a late reply must not reach the next request on this connection.
            self.discard(connection)
            raise
        self.put_back(exchange.node, connection)
        return replies

    async def _share(self, node: Node) -> AsyncConnection:
        """The node's shared connection; one task opens it while others wait."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            connection = self._shared.get(node)
            if connection is not None:
                if await self._is_alive(connection):
                    return connection
                connection.close("the server closed the connection")
            connection = self._shared[node] = await self.open(node)
            return connection

    async def take(self, node: Node) -> AsyncConnection:
        """A connection that only one task uses."""
        spare = self._spare.get(node, [])
        while spare:
            connection = spare.pop()
            # Registered before the check, so that ``close`` and a cancellation find the connection while it is checked.
            self._busy[connection] = node
            try:
                usable = await self._is_alive(connection)
            except BaseException:  # cancelled: its reply must not reach the next request on this connection
                self.discard(connection)
                raise
            if usable:
                return connection
            self.discard(connection)
        connection = await self.open(node)
        self._busy[connection] = node
        return connection

    async def _is_alive(self, connection: AsyncConnection) -> bool:
        """Whether the connection can be used. If it was idle for long, a PING is needed to check it."""
        if connection.alive and connection.idle_s * 1000 > self._limits.idle_check_ms:
            try:
                await connection.exchange([PING])
            except (NotSent, NoAnswer):
                return False
        return connection.is_usable()

    def put_back(self, node: Node, connection: AsyncConnection) -> None:
        self._busy.pop(connection, None)
        spare = self._spare.setdefault(node, [])
        if connection.alive and len(spare) < self._limits.max_idle_connections:
            spare.append(connection)
        else:
            connection.close()

    def discard(self, connection: AsyncConnection) -> None:
        self._busy.pop(connection, None)
        connection.close("given up")

    async def open(self, node: Node) -> AsyncConnection:
        """A new connection whose server has replied. Raises NotSent, or a permanent error."""
        self._refuse_if_closed()  # a retry was due
        try:
            connection = await self._open(node)
        except NotSent as error:
            if node not in self._answered:
                self._answered.add(node)
                if (failure := await asyncio.to_thread(ask_about_tls, self._target, node)) is not None:
                    raise failure from error
            raise
        if self._closed:
            connection.close()  # nothing else would
        self._refuse_if_closed()
        self._answered.add(node)
        return connection

    def _refuse_if_closed(self) -> None:
        """``close`` has closed all connections, and must leave none open: a command whose connection was being opened
        is not sent."""
        if self._closed:
            raise NotSent("the broker was closed")

    async def _open(self, node: Node) -> AsyncConnection:
        try:
            async with asyncio.timeout(self._limits.connect_ms / 1000):
                connection = AsyncConnection(*await open_stream(self._target, node, self._limits), self._limits)
                try:
                    (reply,) = await connection.exchange([PING])
                    check_first_answer(self._target, node, reply)
                except BaseException:  # refused or cancelled: nothing else would close it
                    connection.close()
                    raise
        except TimeoutError as error:
            raise NotSent(f"{node}: no connection within {self._limits.connect_ms} ms") from error
        except (NotSent, MillstreamError):
            raise
        except Exception as error:  # a bug here or in a driver
            raise why_not_connected(self._target, node, error) from error
        return connection

    def _on_new_primary(self, primary: Node) -> None:
        """Closes connections to the old primary, whose commands would never be answered."""
        self._forget_primary()
        for node, connection in self._all():
            if node.kind == "data" and node != primary:
                connection.close(f"{primary} is the primary now")

    def _all(self) -> list[tuple[Node, AsyncConnection]]:
        spare = [(node, connection) for node, connections in self._spare.items() for connection in connections]
        return [*self._shared.items(), *spare, *((node, connection) for connection, node in self._busy.items())]

    def close(self) -> None:
        self._closed = True
        if self._sentinels is not None:
            self._sentinels.close()
        for _, connection in self._all():
            connection.close()
        self._shared.clear()
        self._spare.clear()
        self._busy.clear()


class RedisTransport:
    """The transport to Redis for event loops.

    Thread-safe: each event loop has its own connections. Fork-safe: a child opens new connections.
    """

    def __init__(self, target: Target, *, limits: Limits, clock: Clock, deadline_ms: int, observer: Observer) -> None:
        self.features = Features(cluster=target.kind == "cluster")
        self.now: Callable[[Args], Any] | None = None
        self.target = target
        self._limits = limits
        self._clock = clock
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
        """The node of the key, as far as known, without a request."""
        return self._retry_policy.route.known_node(key)

    def watch_keys(self) -> RedisKeyWatch:
        """A watch of keys for the running event loop."""
        return RedisKeyWatch(self)

    def listen(self, patterns: Any) -> RedisListener:
        return RedisListener(self, tuple(patterns), self._limits, self._observer)

    async def _run(self, exchanges: Exchanges[R]) -> R:
        connections = self.connections()
        try:
            request = exchanges.send(None)
            while True:
                try:
                    result: list[Any] | None = None
                    if type(request) is Exchange:
                        result = await connections.exchange(request)
                    else:
                        await asyncio.sleep(request.seconds)  # type: ignore[union-attr]  # a pause
                except (NotSent, NoAnswer, MillstreamError) as failure:
                    if self._closed:
                        raise closed() from failure
                    request = exchanges.throw(failure)
                else:
                    request = exchanges.send(result)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except MillstreamError:
            raise
        except Exception as error:  # a bug here or in a driver: callers get the errors of the contract only
            raise unexpected_error(error) from error
        finally:
            exchanges.close()

    def connections(self) -> _Connections:
        """The connections of the running event loop."""
        if self._closed:
            raise closed()
        if os.getpid() != self._pid:
            self._after_fork()
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(id(loop))
        if connections is None or connections.loop is not loop:
            self._by_loop = {key: known for key, known in self._by_loop.items() if not known.loop.is_closed()}
            connections = self._by_loop[id(loop)] = _Connections(
                self.target, self._limits, loop, self._retry_policy.route.forget
            )
        return connections

    async def primaries(self) -> list[Node]:
        return await self._run(self._retry_policy.route.primaries())

    async def open_own(self, node: Node) -> AsyncConnection:
        """A connection outside the pool, for a listener."""
        return await self.connections().open(node)

    def _after_fork(self) -> None:
        # The parent's sockets and selector are shared with this child. Closing a transport here, or even collecting it,
        # would remove it from the parent's selector. So the child keeps a reference and never uses it.
        self._abandoned.append(self._by_loop)
        self._by_loop = {}
        self._pid = os.getpid()

    def blocking(self, *, deadline_ms: int = 1_000) -> BlockingRedisTransport:
        """A transport for a thread: same servers, credentials and TLS, its own connections."""
        from millstream.broker.transport.redis_blocking import BlockingRedisTransport

        return BlockingRedisTransport(
            self.target, limits=self._limits, clock=self._clock, deadline_ms=deadline_ms, observer=quiet
        )

    async def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            return
        current_loop = asyncio.get_running_loop()
        for connections in list(self._by_loop.values()):
            if connections.loop is current_loop:
                connections.close()
            elif not connections.loop.is_closed():
                connections.loop.call_soon_threadsafe(connections.close)
        self._by_loop.clear()


def closed() -> BrokerClosed:
    return BrokerClosed("this broker was closed. Open another one with open_broker(url).")
