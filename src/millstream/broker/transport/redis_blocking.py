"""The transport to Redis for threads: each call uses a connection of its own from a pool."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.broker.context import Limits
from millstream.broker.transport.blocking_connection import BlockingConnection
from millstream.broker.transport.connecting import (
    PING,
    ask_about_tls,
    check_first_answer,
    open_socket,
    why_not_connected,
)
from millstream.broker.transport.interface import Features
from millstream.broker.transport.listeners import BlockingRedisListener
from millstream.broker.transport.redis_async import closed
from millstream.broker.transport.retry_policy import RetryPolicy, unexpected_error
from millstream.broker.transport.routes import Exchange, Exchanges, NoAnswer, NotSent, route_to
from millstream.broker.transport.sentinel_watch import BlockingSentinelWatch
from millstream.broker.transport.targets import Node, Target
from millstream.errors import MillstreamError
from millstream.model import Clock, Observer
from millstream.wire import Args, Batch, Command

R = TypeVar("R")


class BlockingRedisTransport:
    """The transport to Redis for threads. Thread-safe. Fork-safe: a child opens new connections."""

    def __init__(self, target: Target, *, limits: Limits, clock: Clock, deadline_ms: int, observer: Observer) -> None:
        self.features = Features(cluster=target.kind == "cluster")
        self.now: Callable[[Args], Any] | None = None
        self.target = target
        self._limits = limits
        self._retry_policy = RetryPolicy(route_to(target), clock, deadline_ms, observer)
        self._observer = observer
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._spare: dict[Node, list[BlockingConnection]] = {}
        self._busy: dict[BlockingConnection, Node] = {}
        self._answered: set[Node] = set()
        """Nodes that have replied, or whose TLS was checked once."""
        self._closed = threading.Event()
        self._sentinels: BlockingSentinelWatch | None = None

    def call(self, command: Command) -> Any:
        return self._run(self._retry_policy.call(command))

    def call_many(self, batch: Batch) -> list[Any]:
        if not batch.commands and batch.after is None:
            return []
        return self._run(self._retry_policy.call_many(batch))

    def node_of(self, key: bytes) -> Node | None:
        """The node of the key, as far as known, without a request."""
        return self._retry_policy.route.known_node(key)

    def listen(self, patterns: Any) -> BlockingRedisListener:
        return BlockingRedisListener(self, tuple(patterns), self._limits, self._observer)

    def _run(self, exchanges: Exchanges[R]) -> R:
        self.check()
        try:
            request = exchanges.send(None)
            while True:
                try:
                    if type(request) is Exchange:
                        result = self.exchange(request)
                    else:
                        self._closed.wait(request.seconds)  # type: ignore[union-attr]  # a pause; closing ends it
                        result = None
                        self.check()
                except (NotSent, NoAnswer, MillstreamError) as failure:
                    if self._closed.is_set():
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

    def exchange(self, exchange: Exchange) -> list[Any]:
        if self._sentinels is None and self.target.kind == "sentinel":
            self._watch_sentinels()
        connection = self._take(exchange.node)
        try:
            return connection.exchange(exchange.requests, exchange.wait_ms, exchange.whole, exchange.reading)
        finally:
            self._put_back(exchange.node, connection)

    def _take(self, node: Node) -> BlockingConnection:
        while True:
            with self._lock:
                spare = self._spare.get(node)
                connection = spare.pop() if spare else None
            if connection is None:
                connection = self.open_own(node)
            elif not self._is_alive(connection):
                connection.close()
                continue
            with self._lock:
                if not self._closed.is_set():
                    self._busy[connection] = node
                    return connection
            connection.close()  # ``close`` did not find it
            raise NotSent("the broker was closed")

    def _is_alive(self, connection: BlockingConnection) -> bool:
        """Whether the connection can be used. If it was idle for long, a PING is needed to check it."""
        if not connection.is_usable():
            return False
        if connection.idle_s * 1000 > self._limits.idle_check_ms:
            try:
                connection.exchange([PING])
            except (NotSent, NoAnswer):
                return False
        return True

    def _put_back(self, node: Node, connection: BlockingConnection) -> None:
        with self._lock:
            self._busy.pop(connection, None)
            spare = self._spare.setdefault(node, [])
            if connection.alive and not self._closed.is_set() and len(spare) < self._limits.max_idle_connections:
                spare.append(connection)
                return
        connection.close()

    def _watch_sentinels(self) -> None:
        with self._lock:
            if self._sentinels is None and not self._closed.is_set():
                self._sentinels = BlockingSentinelWatch(self)
                self._sentinels.start()

    def on_new_primary(self, primary: Node) -> None:
        """Closes connections to the old primary, whose commands would never be answered."""
        self._retry_policy.route.forget()
        with self._lock:
            for node in [node for node in self._spare if node.kind == "data" and node != primary]:
                for connection in self._spare.pop(node):
                    connection.close()
            for connection, node in self._busy.items():
                if node.kind == "data" and node != primary:
                    connection.interrupt()

    def check(self) -> None:
        """Raises BrokerClosed if closed; drops the parent's connections after a fork."""
        if self._closed.is_set():
            raise closed()
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._lock = threading.Lock()  # another thread of the parent may have held it during the fork
            spare, self._spare, self._busy = self._spare, {}, {}
            self._sentinels = None  # its thread exists only in the parent
            for connection in (unused for connections in spare.values() for unused in connections):
                connection.close()  # closes this process's copy of the descriptor; the parent's connection stays open

    def open_own(self, node: Node) -> BlockingConnection:
        """A new connection outside the pool, whose server has replied. Raises NotSent, or a permanent error."""
        try:
            connection = self._open(node)
        except NotSent as error:
            if node not in self._answered:
                self._answered.add(node)
                if (failure := ask_about_tls(self.target, node)) is not None:
                    raise failure from error
            raise
        self._answered.add(node)
        return connection

    def _open(self, node: Node) -> BlockingConnection:
        try:
            connection = BlockingConnection(open_socket(self.target, node, self._limits), self._limits)
            try:
                (reply,) = connection.exchange([PING])
                check_first_answer(self.target, node, reply)
            except BaseException:  # refused or interrupted: nothing else would close it
                connection.close()
                raise
        except (NotSent, MillstreamError):
            raise
        except Exception as error:  # a bug here or in a driver
            raise why_not_connected(self.target, node, error) from error
        return connection

    def primaries(self) -> list[Node]:
        return self._run(self._retry_policy.route.primaries())

    def pause(self, seconds: float) -> None:
        self._closed.wait(seconds)
        self.check()

    def close(self) -> None:
        self._closed.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            spare = [connection for connections in self._spare.values() for connection in connections]
            self._spare.clear()
            busy = list(self._busy)
        if self._sentinels is not None:
            self._sentinels.close()
        for connection in spare:
            connection.close()
        for connection in busy:
            connection.interrupt()
