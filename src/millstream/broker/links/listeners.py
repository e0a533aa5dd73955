"""Listening to channels. Pub/sub keeps nothing: what is sent while nobody is connected is missed."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.broker.context import Limits
from millstream.broker.failures import typed
from millstream.broker.links.async_connection import AsyncConnection
from millstream.broker.links.blocking_connection import BlockingConnection, pack
from millstream.broker.links.retry_policy import BACKOFF
from millstream.broker.links.routes import NoAnswer, NotSent
from millstream.broker.links.targets import Node
from millstream.errors import BrokerUnavailable
from millstream.model import Observer
from millstream.wire import Args, ErrorReply

if TYPE_CHECKING:
    from millstream.broker.links.redis_async import RedisLink
if TYPE_CHECKING:
    from millstream.broker.links.redis_blocking import BlockingRedisLink


NODE_LOCAL = b"__key"
"""Keyspace and keyevent channels: in a cluster each node tells of its own keys only."""


def subscriptions(patterns: Sequence[bytes], primaries: Sequence[Node]) -> dict[Node, Args]:
    """One PSUBSCRIBE for each node. Ordinary messages travel to all nodes, so that one of them is enough;

    listening for them everywhere would bring each message once for every node.
    """
    local = [pattern for pattern in patterns if pattern.startswith(NODE_LOCAL)]
    common = [pattern for pattern in patterns if not pattern.startswith(NODE_LOCAL)]
    wanted: dict[Node, Args] = {}
    for index, node in enumerate(primaries):
        here = [*local, *(common if index == 0 else ())]
        if here:
            wanted[node] = (b"PSUBSCRIBE", *here)
    return wanted


def message_of(reply: Any) -> tuple[bytes, bytes] | None:
    """(channel, payload), or None for what merely confirms."""
    if isinstance(reply, list) and len(reply) == 4 and reply[0] == b"pmessage":
        return reply[2], reply[3]
    return None


def confirms(reply: Any) -> bool:
    return isinstance(reply, list) and len(reply) == 3 and reply[0] == b"psubscribe"


class RedisListener:
    """Subscribes on first use; when a connection breaks it subscribes anew, and the observer is told of the gap."""

    def __init__(self, link: RedisLink, patterns: Sequence[bytes], limits: Limits, observer: Observer) -> None:
        self._link = link
        self._patterns = patterns
        self._limits = limits
        self._observer = observer
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=limits.listen_backlog)
        self._news = asyncio.Event()
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
                    self._news.clear()
                    await self._news.wait()
        finally:
            self._drop()

    async def _subscribe(self) -> None:
        """Returns when every node has confirmed."""
        self._drop()
        self._broken, self._confirmed, self._refused = False, 0, None
        try:
            wanted = subscriptions(self._patterns, await self._link.primaries())
            for node, words in wanted.items():
                connection = await self._link.open_own(node)
                connection.on_push = self._on_push
                connection.on_lost = self._on_lost
                self._connections.append(connection)
                connection.subscribe(pack(words))
            due = sum(len(words) - 1 for words in wanted.values())
            async with asyncio.timeout(self._limits.answer_ms / 1000):
                while self._confirmed < due:
                    if self._refused is not None:
                        raise typed(self._refused)
                    if self._broken:
                        raise BrokerUnavailable("the connection broke while subscribing. Try again.")
                    self._news.clear()
                    await self._news.wait()
        except (NotSent, NoAnswer, TimeoutError) as error:
            self._drop()
            raise BrokerUnavailable(f"cannot subscribe: {error or 'no answer'}. Check that the server runs.") from error
        except BaseException:
            self._drop()
            raise

    def _on_push(self, reply: Any) -> None:
        message = message_of(reply)
        if message is not None:
            if len(self._messages) == self._messages.maxlen:
                self._observer("broker.listener_overflow", dropped=1)
            self._messages.append(message)
        elif confirms(reply):
            self._confirmed += 1
        elif type(reply) is ErrorReply:
            self._refused = reply
        self._news.set()

    def _on_lost(self) -> None:
        if not self._broken and self._connections:
            self._broken = True
            self._observer("broker.listener_lost", patterns=self._patterns)
        self._news.set()

    def _drop(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


LOOK_S = 0.5
"""How often a waiting listener looks whether its broker was closed."""


class BlockingRedisListener:
    """The same for one thread at a time."""

    def __init__(self, link: BlockingRedisLink, patterns: Sequence[bytes], limits: Limits, observer: Observer) -> None:
        self._link = link
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
                    self._link.pause(BACKOFF.delay_ms(attempt, random.random()) / 1000)  # noqa: S311 - spreads retries
                    continue
                while self._messages:
                    yield self._messages.popleft()
        finally:
            self._drop()

    def _subscribe(self) -> None:
        self._drop()
        wanted = subscriptions(self._patterns, self._link.primaries())
        try:
            for node, words in wanted.items():
                connection = self._link.open_own(node)
                self._connections.append(connection)
                self._selector.register(connection.descriptor, selectors.EVENT_READ, connection)
                connection.send([words])
                confirmed = 0
                while confirmed < len(words) - 1:
                    confirmed += not self._take(connection.receive(self._limits.answer_ms / 1000))
        except TimeoutError as error:
            self._drop()
            raise BrokerUnavailable("no answer to PSUBSCRIBE. Check the server.") from error
        except BaseException:
            self._drop()
            raise

    def _wait(self) -> None:
        """Until something has come, or the broker was closed."""
        while not self._messages:
            self._link.check()
            for key, _ in self._selector.select(LOOK_S):
                for reply in key.data.received():
                    self._take(reply)

    def _take(self, reply: Any) -> bool:
        """Keeps a message; True if it was one."""
        if type(reply) is ErrorReply:
            raise typed(reply)
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
