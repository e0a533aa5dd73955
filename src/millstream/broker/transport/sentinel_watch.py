"""Subscribes to the sentinels' messages about a new primary, to switch at once instead of after an error or a timeout.

A subscription to ``+switch-master`` of one sentinel, on a connection of its own. It is only a hint: pub/sub stores
nothing, and after a missed message the new primary is found a little later, by the route.
"""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from millstream.broker.transport.async_connection import AsyncConnection
from millstream.broker.transport.blocking_connection import BlockingConnection
from millstream.broker.transport.retry_policy import BACKOFF
from millstream.broker.transport.routes import NoAnswer, NotSent
from millstream.broker.transport.targets import Node, Target
from millstream.errors import MillstreamError
from millstream.wire import Args

CHANNEL = b"+switch-master"
SUBSCRIBE: Args = (b"SUBSCRIBE", CHANNEL)


def confirmed(reply: Any) -> bool:
    """Whether the sentinel confirmed the subscription. After an error (NOPERM) no message would ever arrive."""
    return isinstance(reply, list) and reply[:2] == [b"subscribe", CHANNEL]


def new_primary(reply: Any, service: str) -> Node | None:
    """The new primary in a message ``name old-host old-port new-host new-port``; None for another service."""
    if not isinstance(reply, list) or len(reply) != 3 or reply[:2] != [b"message", CHANNEL]:
        return None
    parts = reply[2].decode(errors="replace").split(" ")
    if len(parts) != 5 or parts[0] != service or not parts[4].isdigit():
        return None
    return Node(parts[3], int(parts[4]))


class SentinelWatch:
    """The watch of one event loop: a connection, and a timer to reconnect. It keeps no task running."""

    def __init__(
        self, target: Target, open_connection: Callable[[Node], Any], on_new_primary: Callable[[Node], None]
    ) -> None:
        self._target = target
        self._open_connection = open_connection
        self._on_new_primary = on_new_primary
        self._connection: AsyncConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._closed = False

    def start(self) -> None:
        """Subscribes, unless it is subscribed or about to be."""
        if self._closed or self._connection is not None or self._opening is not None or self._timer is not None:
            return
        sentinels = self._target.nodes
        sentinel = sentinels[self._failures % len(sentinels)]
        self._opening = asyncio.get_running_loop().create_task(self._subscribe(sentinel))

    async def _subscribe(self, sentinel: Node) -> None:
        connection: AsyncConnection | None = None
        try:
            connection = await self._open_connection(sentinel)
            connection.on_push = self._on_message  # a message may follow the confirmation immediately
            listening = confirmed((await connection.exchange([SUBSCRIBE]))[0]) and connection.alive
        except (NotSent, NoAnswer, MillstreamError):
            listening = False
        except BaseException:  # cancelled: nothing else would close the connection
            if connection is not None:
                connection.close()
            raise
        finally:
            self._opening = None  # also after an unexpected error: the next request starts it again
        if connection is not None and listening and not self._closed:
            self._connection = connection
            self._failures = 0
            connection.on_lost = self._lost
            return
        if connection is not None:
            connection.close()
        self._schedule_retry()

    def _on_message(self, reply: Any) -> None:
        if (primary := new_primary(reply, self._target.service)) is not None:
            self._on_new_primary(primary)

    def _lost(self) -> None:
        self._connection = None
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if self._closed:
            return
        self._failures += 1
        delay_s = BACKOFF.delay_ms(self._failures, random.random()) / 1000  # noqa: S311 - spreads retries
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self.start()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close()


class Switchable(Protocol):
    """What ``BlockingSentinelWatch`` needs of a blocking transport."""

    target: Target

    def open_own(self, node: Node) -> BlockingConnection: ...

    def on_new_primary(self, primary: Node) -> None: ...

    def pause(self, seconds: float) -> None: ...


class BlockingSentinelWatch(threading.Thread):
    """The watch for threads: a thread that waits on its connection. It holds its transport only by a weak reference."""

    def __init__(self, transport: Switchable) -> None:
        super().__init__(name="millstream sentinel watch", daemon=True)
        self._transport = weakref.ref(transport, lambda _: self.close())
        self._sentinels: Sequence[Node] = transport.target.nodes
        self._service = transport.target.service
        self._connection: BlockingConnection | None = None
        self._failures = 0
        self._closed = False

    def run(self) -> None:
        while not self._closed:
            try:
                self._listen(self._sentinels[self._failures % len(self._sentinels)])
            except (NotSent, NoAnswer, MillstreamError):
                pass  # the connection broke, the sentinel needs another password, or the transport was closed
            self._failures += 1
            transport = self._transport()
            if transport is None or self._closed:
                return
            try:
                transport.pause(BACKOFF.delay_ms(self._failures, random.random()) / 1000)  # noqa: S311 - spreads retries
            except MillstreamError:
                return  # the transport was closed
            del transport

    def _listen(self, sentinel: Node) -> None:
        transport = self._transport()
        if transport is None:
            return
        connection = self._connection = transport.open_own(sentinel)
        del transport
        try:
            if self._closed or not confirmed(connection.exchange([SUBSCRIBE])[0]):
                return
            self._failures = 0
            while True:
                reply = connection.receive(None)
                if (primary := new_primary(reply, self._service)) is not None and (
                    transport := self._transport()
                ) is not None:
                    transport.on_new_primary(primary)
                    del transport
        finally:
            self._connection = None
            connection.close()

    def close(self) -> None:
        self._closed = True
        if (connection := self._connection) is not None:
            connection.interrupt()
