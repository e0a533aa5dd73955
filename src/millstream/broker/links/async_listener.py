"""Listening to channels from an event loop. Pub/sub keeps nothing: what is sent while nobody is connected is missed."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.broker.failures import typed
from millstream.broker.limits import Limits
from millstream.broker.links.async_wire import AsyncWire
from millstream.broker.links.exchange import NoAnswer, NotSent
from millstream.broker.links.journey import BACKOFF
from millstream.broker.links.packing import pack
from millstream.broker.links.subscriptions import confirms, message_of, subscriptions
from millstream.errors import BrokerUnavailable
from millstream.model.observer import Observer
from millstream.wire.replies import ErrorReply

if TYPE_CHECKING:
    from millstream.broker.links.redis_async import RedisLink


class AsyncListener:
    """Subscribes on first use; when a connection breaks it subscribes anew, and the observer is told of the gap."""

    def __init__(self, link: RedisLink, patterns: Sequence[bytes], limits: Limits, observer: Observer) -> None:
        self._link = link
        self._patterns = patterns
        self._limits = limits
        self._observer = observer
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=limits.listen_backlog)
        self._news = asyncio.Event()
        self._wires: list[AsyncWire] = []
        self._confirmed = 0
        self._refused: ErrorReply | None = None
        self._broken = False

    async def __aenter__(self) -> AsyncListener:
        await self._subscribe()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._drop()

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, bytes]]:
        try:
            attempt = 0
            while True:
                if not self._wires or self._broken:
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
                wire = await self._link.open_own(node)
                wire.on_push = self._on_push
                wire.on_lost = self._on_lost
                self._wires.append(wire)
                wire.subscribe(pack(words))
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
        if not self._broken and self._wires:
            self._broken = True
            self._observer("broker.listener_lost", patterns=self._patterns)
        self._news.set()

    def _drop(self) -> None:
        wires, self._wires = self._wires, []
        for wire in wires:
            wire.close()
