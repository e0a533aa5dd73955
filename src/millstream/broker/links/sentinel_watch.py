"""Hearing of a new primary from the sentinels at once, instead of finding out when the old one refuses or falls silent.

A subscription to ``+switch-master`` of one sentinel, beside the connections that carry commands. It is a hint: who
misses it (pub/sub keeps nothing) finds the new primary as before, a little later.
"""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from millstream.broker.links.async_connection import AsyncConnection
from millstream.broker.links.blocking_connection import BlockingConnection
from millstream.broker.links.retry_policy import BACKOFF
from millstream.broker.links.routes import NoAnswer, NotSent
from millstream.broker.links.targets import Node, Target
from millstream.errors import MillstreamError
from millstream.wire import Args

CHANNEL = b"+switch-master"
SUBSCRIBE: Args = (b"SUBSCRIBE", CHANNEL)


def confirmed(reply: Any) -> bool:
    """Whether the sentinel will tell. One that refuses (NOPERM) would leave its listener waiting for ever."""
    return isinstance(reply, list) and reply[:2] == [b"subscribe", CHANNEL]


def new_primary(reply: Any, service: str) -> Node | None:
    """What a message says: ``name old-host old-port new-host new-port``. None for another service."""
    if not isinstance(reply, list) or len(reply) != 3 or reply[:2] != [b"message", CHANNEL]:
        return None
    words = reply[2].decode(errors="replace").split(" ")
    if len(words) != 5 or words[0] != service or not words[4].isdigit():
        return None
    return Node(words[3], int(words[4]))


class SentinelWatch:
    """For one event loop. No task of its own lives on: only a connection, and a timer where that was lost."""

    def __init__(self, target: Target, open_one: Callable[[Node], Any], switched: Callable[[Node], None]) -> None:
        self._target = target
        self._open_one = open_one
        self._switched = switched
        self._connection: AsyncConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._closed = False

    def start(self) -> None:
        """Does nothing where it listens already, or is about to."""
        if self._closed or self._connection is not None or self._opening is not None or self._timer is not None:
            return
        sentinels = self._target.nodes
        sentinel = sentinels[self._failures % len(sentinels)]
        self._opening = asyncio.get_running_loop().create_task(self._subscribe(sentinel))

    async def _subscribe(self, sentinel: Node) -> None:
        connection: AsyncConnection | None = None
        try:
            connection = await self._open_one(sentinel)
            connection.on_push = self._heard  # a message may come right behind the confirmation
            listening = confirmed((await connection.exchange([SUBSCRIBE]))[0]) and connection.alive
        except (NotSent, NoAnswer, MillstreamError):
            listening = False
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._opening = None
        if connection is not None and listening and not self._closed:
            self._connection = connection
            self._failures = 0
            connection.on_lost = self._lost
            return
        if connection is not None:
            connection.close()
        self._again()

    def _heard(self, reply: Any) -> None:
        if (primary := new_primary(reply, self._target.service)) is not None:
            self._switched(primary)

    def _lost(self) -> None:
        self._connection = None
        self._again()

    def _again(self) -> None:
        if self._closed:
            return
        self._failures += 1
        delay_s = BACKOFF.delay_ms(self._failures, random.random()) / 1000  # noqa: S311 - spreads retries
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._due)

    def _due(self) -> None:
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
    """What the thread below needs of a blocking link."""

    target: Target

    def open_own(self, node: Node) -> BlockingConnection: ...

    def switched(self, primary: Node) -> None: ...

    def pause(self, seconds: float) -> None: ...


class BlockingSentinelWatch(threading.Thread):
    """The same for threads: one more, which sleeps on its connection. It holds its link by a weak reference only."""

    def __init__(self, link: Switchable) -> None:
        super().__init__(name="millstream sentinel watch", daemon=True)
        self._link = weakref.ref(link, lambda _: self.close())
        self._sentinels: Sequence[Node] = link.target.nodes
        self._service = link.target.service
        self._connection: BlockingConnection | None = None
        self._failures = 0
        self._closed = False

    def run(self) -> None:
        while not self._closed:
            try:
                self._listen(self._sentinels[self._failures % len(self._sentinels)])
            except (NotSent, NoAnswer, MillstreamError):
                pass  # the connection is gone; a sentinel wants another password; or the link was closed
            self._failures += 1
            link = self._link()
            if link is None or self._closed:
                return
            try:
                link.pause(BACKOFF.delay_ms(self._failures, random.random()) / 1000)  # noqa: S311 - spreads retries
            except MillstreamError:
                return  # the link was closed
            del link

    def _listen(self, sentinel: Node) -> None:
        link = self._link()
        if link is None:
            return
        connection = self._connection = link.open_own(sentinel)
        del link
        try:
            if self._closed or not confirmed(connection.exchange([SUBSCRIBE])[0]):
                return
            self._failures = 0
            while True:
                reply = connection.receive(None)
                if (primary := new_primary(reply, self._service)) is not None and (link := self._link()) is not None:
                    link.switched(primary)
                    del link
        finally:
            self._connection = None
            connection.close()

    def close(self) -> None:
        self._closed = True
        if (connection := self._connection) is not None:
            connection.interrupt()
