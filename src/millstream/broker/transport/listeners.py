"""Subscriptions to channels. Pub/sub stores nothing: messages that are published while a connection is broken are
missed.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.broker.context import Limits
from millstream.broker.failures import typed_error
from millstream.broker.transport.async_connection import AsyncConnection
from millstream.broker.transport.blocking_connection import BlockingConnection, pack
from millstream.broker.transport.retry_policy import BACKOFF
from millstream.broker.transport.routes import NoAnswer, NotSent
from millstream.broker.transport.targets import Node
from millstream.errors import BrokerUnavailable
from millstream.model import Observer
from millstream.wire import Args, ErrorReply

if TYPE_CHECKING:
    from millstream.broker.transport.redis_async import RedisTransport
    from millstream.broker.transport.redis_blocking import BlockingRedisTransport


NODE_LOCAL = b"__key"
"""Keyspace and keyevent channels: in a cluster each node publishes events only of its own keys."""


def subscriptions(patterns: Sequence[bytes], primaries: Sequence[Node]) -> dict[Node, Args]:
    """One PSUBSCRIBE for each node that must be subscribed to.

    Ordinary messages are sent to all nodes, so one node is enough; subscribing on every node would deliver each message
    several times.
    """
    local = [pattern for pattern in patterns if pattern.startswith(NODE_LOCAL)]
    common = [pattern for pattern in patterns if not pattern.startswith(NODE_LOCAL)]
    commands: dict[Node, Args] = {}
    for index, node in enumerate(primaries):
        for_node = [*local, *(common if index == 0 else ())]
        if for_node:
            commands[node] = (b"PSUBSCRIBE", *for_node)
    return commands


def message_of(reply: Any) -> tuple[bytes, bytes] | None:
    """(channel, payload) of a message, or None for a confirmation."""
    if isinstance(reply, list) and len(reply) == 4 and reply[0] == b"pmessage":
        return reply[2], reply[3]
    return None


def is_confirmation(reply: Any) -> bool:
    """Whether the reply confirms a subscription."""
    return isinstance(reply, list) and len(reply) == 3 and reply[0] == b"psubscribe"


class RedisListener:
    """A subscription for event loops. If a connection breaks it subscribes again, and an observer event is emitted."""

    def __init__(
        self, transport: RedisTransport, patterns: Sequence[bytes], limits: Limits, observer: Observer
    ) -> None:
        self._transport = transport
        self._patterns = patterns
        self._limits = limits
        self._observer = observer
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=limits.listen_backlog)
        self._changed = asyncio.Event()
        self._connections: list[AsyncConnection] = []
        self._confirmed = 0
        self._refused: ErrorReply | None = None
        self._broken = False

    async def __aenter__(self) -> RedisListener:
        await self._subscribe()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._drop()

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bytes]]:
        try:
            attempt = 0
            while True:
                if not self._connections or self._broken:
                    try:
                        await self._subscribe()
                    except BrokerUnavailable:
                        attempt += 1
                        await asyncio.sleep(BACKOFF.delay_ms(attempt, random.random()) / 1000)  # noqa: S311 - spreads retries
                        continue
                    attempt = 0
                while self._messages:
                    yield self._messages.popleft()
                if not self._broken:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._drop()

    async def _subscribe(self) -> None:
        """Subscribes; returns when every node has confirmed."""
        self._drop()
        self._broken, self._confirmed, self._refused = False, 0, None
        try:
            commands = subscriptions(self._patterns, await self._transport.primaries())
            for node, args in commands.items():
                connection = await self._transport.open_own(node)
                connection.on_push = self._on_push
                connection.on_lost = self._on_lost
                self._connections.append(connection)
                connection.subscribe(pack(args))
            due = sum(len(args) - 1 for args in commands.values())
            async with asyncio.timeout(self._limits.answer_ms / 1000):
                while self._confirmed < due:
                    if self._refused is not None:
                        raise typed_error(self._refused)
                    if self._broken:
                        raise BrokerUnavailable("the connection broke while subscribing. Try again.")
                    self._changed.clear()
                    await self._changed.wait()
        except (NotSent, NoAnswer, TimeoutError) as error:
            self._drop()
            raise BrokerUnavailable(f"cannot subscribe: {error or 'no reply'}. Check that the server runs.") from error
        except BaseException:  # refused or cancelled: no connection stays open with a part of the subscriptions
            self._drop()
            raise

    def _on_push(self, reply: Any) -> None:
        message = message_of(reply)
        if message is not None:
            if len(self._messages) == self._messages.maxlen:
                self._observer("broker.listener_overflow", dropped=1)
            self._messages.append(message)
        elif is_confirmation(reply):
            self._confirmed += 1
        elif type(reply) is ErrorReply:
            self._refused = reply
        self._changed.set()

    def _on_lost(self) -> None:
        if not self._broken and self._connections:
            self._broken = True
            self._observer("broker.listener_lost", patterns=self._patterns)
        self._changed.set()

    def _drop(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


CLOSED_CHECK_S = 0.5
"""How often a waiting listener checks whether its broker was closed."""


class BlockingRedisListener:
    """A subscription for threads, used by one thread at a time."""

    def __init__(
        self, transport: BlockingRedisTransport, patterns: Sequence[bytes], limits: Limits, observer: Observer
    ) -> None:
        self._transport = transport
        self._patterns = patterns
        self._limits = limits
        self._observer = observer
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=limits.listen_backlog)
        self._connections: list[BlockingConnection] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> BlockingRedisListener:
        self._subscribe()
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        attempt = 0
        try:
            while True:
                try:
                    if not self._connections:
                        self._subscribe()
                    attempt = 0
                    self._wait()
                except (NotSent, NoAnswer, BrokerUnavailable):
                    if self._connections:
                        self._observer("broker.listener_lost", patterns=self._patterns)
                    self._drop()
                    attempt += 1
                    self._transport.pause(BACKOFF.delay_ms(attempt, random.random()) / 1000)  # noqa: S311 - spreads retries
                    continue
                while self._messages:
                    yield self._messages.popleft()
        finally:
            self._drop()

    def _subscribe(self) -> None:
        self._drop()
        commands = subscriptions(self._patterns, self._transport.primaries())
        try:
            for node, args in commands.items():
                connection = self._transport.open_own(node)
                self._connections.append(connection)
                self._selector.register(connection.descriptor, selectors.EVENT_READ, connection)
                connection.send([args])
                confirmed = 0
                while confirmed < len(args) - 1:
                    confirmed += not self._receive(connection.receive(self._limits.answer_ms / 1000))
        except TimeoutError as error:
            self._drop()
            raise BrokerUnavailable("no reply to PSUBSCRIBE. Check that the server runs.") from error
        except BaseException:  # refused or cancelled: no connection stays open with a part of the subscriptions
            self._drop()
            raise

    def _wait(self) -> None:
        """Waits until a message arrives or the broker is closed."""
        while not self._messages:
            self._transport.check()
            for key, _ in self._selector.select(CLOSED_CHECK_S):
                for reply in key.data.received():
                    self._receive(reply)

    def _receive(self, reply: Any) -> bool:
        """Buffers a message; True if the reply was one."""
        if type(reply) is ErrorReply:
            raise typed_error(reply)
        message = message_of(reply)
        if message is not None:
            if len(self._messages) == self._messages.maxlen:
                self._observer("broker.listener_overflow", dropped=1)
            self._messages.append(message)
        return message is not None

    def _drop(self) -> None:
        connections, self._connections = self._connections, []
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        for connection in connections:
            connection.close()
