"""Listening to channels from a thread."""

from __future__ import annotations

import random
import selectors
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.broker.failures import typed
from millstream.broker.links.blocking_wire import BlockingWire
from millstream.broker.links.exchange import NoAnswer, NotSent
from millstream.broker.links.journey import BACKOFF
from millstream.broker.links.subscriptions import message_of, subscriptions
from millstream.errors import BrokerUnavailable
from millstream.wire.replies import ErrorReply

if TYPE_CHECKING:
    from millstream.broker.links.redis_blocking import BlockingRedisLink

LOOK_S = 0.5
"""How often a waiting listener looks whether its broker was closed."""


class BlockingWireListener:
    """Subscribes on first use; when a connection breaks it subscribes anew. For one thread at a time."""

    def __init__(self, link: BlockingRedisLink, patterns: Sequence[bytes]) -> None:
        self._link = link
        self._patterns = patterns
        self._messages: deque[tuple[bytes, bytes]] = deque()
        self._wires: list[BlockingWire] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> BlockingWireListener:
        self._subscribe()
        return self

    def __exit__(self, *exc: object) -> None:
        self._drop()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        attempt = 0
        try:
            while True:
                try:
                    if not self._wires:
                        self._subscribe()
                    attempt = 0
                    self._wait()
                except (NotSent, NoAnswer, BrokerUnavailable):
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
                wire = self._link.open_own(node)
                self._wires.append(wire)
                self._selector.register(wire.descriptor, selectors.EVENT_READ, wire)
                wire.send([words])
                confirmed = 0
                while confirmed < len(words) - 1:
                    confirmed += not self._take(wire.receive(5.0))
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
            self._messages.append(message)
        return message is not None

    def _drop(self) -> None:
        wires, self._wires = self._wires, []
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        for wire in wires:
            wire.close()
