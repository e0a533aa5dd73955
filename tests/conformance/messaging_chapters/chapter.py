"""Shared by all chapters: new names, short intervals, and subscribers in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from millstream.broker import open_broker
from millstream.broker.broker import Broker
from millstream.messaging import Backoff, Handler, Message, Publisher, Subscriber
from millstream.model import EntryId
from millstream.testing.faults import FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Command

QUICK: dict[str, Any] = {
    "group_start": "0",
    "block_ms": 100,
    "claim_interval_ms": 50,
    "backoff": Backoff(initial_ms=1, max_ms=5),
}
"""Short intervals. The idle time for claims keeps its default of 60 s, so that nothing is claimed by mistake."""


class Chapter:
    """Give it a fixture ``broker``."""

    @pytest.fixture
    def topic(self) -> str:
        return f"topic:{uuid4().hex[:12]}"

    @pytest.fixture
    async def publisher(self, broker: Broker) -> AsyncIterator[Publisher]:
        async with Publisher(broker) as publisher:
            yield publisher


class RecordingHandler:
    """A handler that records its messages, and then calls ``then``."""

    def __init__(self, then: Callable[[Message], Awaitable[Any]] | None = None) -> None:
        self.messages: list[Message] = []
        self.running = 0
        self.max_running = 0
        """The maximum number of handlers that ran at a time."""
        self._then = then

    async def __call__(self, message: Message) -> Any:
        self.messages.append(message)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._then(message) if self._then is not None else None
        finally:
            self.running -= 1

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    async def have(self, count: int, timeout_s: float = 60.0) -> None:
        await eventually(lambda: len(self.messages) >= count, what=f"{count} deliveries", timeout_s=timeout_s)


@asynccontextmanager
async def running(
    broker: Broker, topic: str, handler: Handler, *, publish_to: str | None = None, **options: Any
) -> AsyncIterator[Subscriber]:
    """Runs a subscriber of group ``g``. It is closed at the end, and its error is raised."""
    subscriber = Subscriber(broker, **{"group": "g", "consumer": f"c-{uuid4().hex[:6]}", **QUICK, **options})
    task = asyncio.create_task(subscriber.consume(topic, handler, publish_to=publish_to))
    try:
        yield subscriber
    finally:
        await subscriber.close()
        await task


class EventLog:
    """An observer that records the events of a broker."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, /, **values: Any) -> None:
        self.events.append((name, values))

    def __contains__(self, name: str) -> bool:
        return any(event == name for event, _ in self.events)

    def all(self, name: str, key: str) -> list[Any]:
        return [values[key] for event, values in self.events if event == name]

    def observe(self, broker: Broker, transport: Any = None) -> Broker:
        """The same broker, with this observer."""
        return Broker(transport or broker.transport, replace(broker.context, observer=self))


async def nothing_pending(broker: Broker, topic: str, group: str = "g") -> None:
    async def empty() -> bool:
        return (await broker.xpending(topic, group)).count == 0

    await eventually(empty, what="an empty pending list")


async def publish_one(publisher: Publisher, topic: str, payload: bytes = b"x") -> EntryId:
    """Publishes a message and returns its id."""
    (entry_id,) = await publisher.publish(topic, Message(payload))
    assert entry_id is not None
    return entry_id


async def flush(url: str) -> None:
    """Flushes every node."""
    _, is_cluster, nodes = url.partition("redis+cluster://")
    for node in [f"redis://{address}" for address in nodes.split(",")] if is_cluster else [url]:
        async with open_broker(node) as broker:
            await broker.transport.call(Command((b"FLUSHALL",)))


def numbered(count: int, start: int = 0) -> list[Message]:
    return [Message(b"%d" % n) for n in range(start, start + count)]


class HeldBack:
    """A transport on which one script waits for ``let_through``, before it runs or ``after``. It records the number of
    arguments of each call.

    As on a network: if the call was ``sent``, the script is executed, even if the caller no longer waits for the reply.
    """

    def __init__(self, broker: Broker, sha: bytes, *, after: bool = False, sent: bool = True) -> None:
        self.transport = FaultyTransport(broker.transport)
        self.let_through = asyncio.Event()
        self.words: list[int] = []
        self._call = self.transport.call
        self._sha = sha
        self._after = after
        self._sent = sent
        self.transport.call = self._slow  # type: ignore[method-assign]  # this is what the broker calls

    async def _slow(self, command: Command) -> Any:
        if command.args[:2] != (b"EVALSHA", self._sha):
            return await self._call(command)
        self.words.append(len(command.args))
        if not self._sent:
            return await self._later(command)
        return await asyncio.shield(asyncio.ensure_future(self._later(command)))

    async def _later(self, command: Command) -> Any:
        if self._after:
            answer = await self._call(command)
            await self.let_through.wait()
            return answer
        await self.let_through.wait()
        return await self._call(command)
