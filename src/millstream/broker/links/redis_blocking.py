"""The link to Redis for threads: each call has a connection of its own, taken from a small stock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.broker.context import Limits
from millstream.broker.links.blocking_connection import BlockingConnection
from millstream.broker.links.connecting import PING, ask_about_tls, check_first_answer, open_socket, why_not_connected
from millstream.broker.links.link import Features
from millstream.broker.links.listeners import BlockingRedisListener
from millstream.broker.links.redis_async import closed
from millstream.broker.links.retry_policy import RetryPolicy, unforeseen
from millstream.broker.links.routes import Exchange, Exchanges, NoAnswer, NotSent, route_to
from millstream.broker.links.sentinel_watch import BlockingSentinelWatch
from millstream.broker.links.targets import Node, Target
from millstream.errors import MillstreamError
from millstream.model import Clock, Observer
from millstream.wire import Args, Batch, Command

R = TypeVar("R")


class BlockingRedisLink:
    """Thread-safe. Fork-safe: a child makes connections of its own."""

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
        self._out: dict[BlockingConnection, Node] = {}
        self._answered: set[Node] = set()
        """Nodes that have answered, or that were asked about TLS once."""
        self._closed = threading.Event()
        self._sentinels: BlockingSentinelWatch | None = None

    def call(self, command: Command) -> Any:
        return self._run(self._retry_policy.call(command))

    def call_many(self, batch: Batch) -> list[Any]:
        if not batch.commands and batch.after is None:
            return []
        return self._run(self._retry_policy.call_many(batch))

    def node_of(self, key: bytes) -> Node | None:
        """Which node has the key, as far as is known; nobody is asked."""
        return self._retry_policy.route.known_node(key)

    def listen(self, patterns: Any) -> BlockingRedisListener:
        return BlockingRedisListener(self, tuple(patterns), self._limits, self._observer)

    def _run(self, exchanges: Exchanges[R]) -> R:
        self.check()
        try:
            step = exchanges.send(None)
            while True:
                try:
                    if type(step) is Exchange:
                        result = self.exchange(step)
                    else:
                        self._closed.wait(step.seconds)  # type: ignore[union-attr]  # a pause; closing ends it
                        result = None
                        self.check()
                except (NotSent, NoAnswer, MillstreamError) as trouble:
                    if self._closed.is_set():
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

    def exchange(self, asked: Exchange) -> list[Any]:
        if self._sentinels is None and self.target.kind == "sentinel":
            self._watch_sentinels()
        connection = self._take(asked.node)
        try:
            return connection.exchange(asked.requests, asked.wait_ms, asked.whole, asked.reading)
        finally:
            self._give_back(asked.node, connection)

    def _take(self, node: Node) -> BlockingConnection:
        while True:
            with self._lock:
                spare = self._spare.get(node)
                connection = spare.pop() if spare else None
            if connection is None:
                connection = self.open_own(node)
            elif not self._well(connection):
                connection.close()
                continue
            with self._lock:
                self._out[connection] = node
            return connection

    def _well(self, connection: BlockingConnection) -> bool:
        """Whether a command may be trusted to it. After a long silence only an answer proves that."""
        if not connection.quiet():
            return False
        if connection.idle_s * 1000 > self._limits.idle_check_ms:
            try:
                connection.exchange([PING])
            except (NotSent, NoAnswer):
                return False
        return True

    def _give_back(self, node: Node, connection: BlockingConnection) -> None:
        with self._lock:
            self._out.pop(connection, None)
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

    def switched(self, primary: Node) -> None:
        """There is a new primary: whatever waits for the old one waits in vain."""
        self._retry_policy.route.forget()
        with self._lock:
            for node in [node for node in self._spare if node.kind == "data" and node != primary]:
                for connection in self._spare.pop(node):
                    connection.close()
            for connection, node in self._out.items():
                if node.kind == "data" and node != primary:
                    connection.interrupt()

    def check(self) -> None:
        """Raises BrokerClosed; drops the parent's connections after a fork."""
        if self._closed.is_set():
            raise closed()
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._lock = threading.Lock()  # the parent's may have been held while it forked
            spare, self._spare, self._out = self._spare, {}, {}
            self._sentinels = None  # threads stay with the parent
            for connection in (one for many in spare.values() for one in many):
                connection.close()  # closes this process's copy of the descriptor; the parent's connection lives on

    def open_own(self, node: Node) -> BlockingConnection:
        """A new connection, outside the stock, whose server has answered. Raises NotSent, or what no second try will
        mend."""
        try:
            connection = self._open(node)
        except NotSent as error:
            if node not in self._answered:
                self._answered.add(node)
                if (trouble := ask_about_tls(self.target, node)) is not None:
                    raise trouble from error
            raise
        self._answered.add(node)
        return connection

    def _open(self, node: Node) -> BlockingConnection:
        try:
            connection = BlockingConnection(open_socket(self.target, node, self._limits), self._limits)
            try:
                (reply,) = connection.exchange([PING])
                check_first_answer(self.target, node, reply)
            except BaseException:
                connection.close()
                raise
        except (NotSent, MillstreamError):
            raise
        except Exception as error:
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
            spare = [one for many in self._spare.values() for one in many]
            self._spare.clear()
            busy = list(self._out)
        if self._sentinels is not None:
            self._sentinels.close()
        for connection in spare:
            connection.close()
        for connection in busy:
            connection.interrupt()
