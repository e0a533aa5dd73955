"""Pytest fixtures for users' tests, loaded wherever this package is installed (entry point ``pytest11``).

They work with every plugin for async tests: an embedded broker is opened and closed without an event loop. Modules are
imported when a fixture is first used, so that pytest starts fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from millstream import Broker, Router
    from millstream.messaging.route import Route
    from millstream.testing.ledger import DeliveryLedger


class RecordedEvents(list[tuple[str, dict[str, Any]]]):
    """The observer events of this test's broker: an observer, and a list of (name, fields)."""

    def __call__(self, name: str, /, **fields: Any) -> None:
        self.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        """The fields of the events with this name, such as ``messaging.dead_lettered``."""
        return [fields for event_name, fields in self if event_name == name]


class RunningRouter:
    """A router that runs in a test."""

    def __init__(self, broker: Broker, routes: list[Route], events: RecordedEvents) -> None:
        self._broker = broker
        self._routes = routes
        self._events = events

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The failures of handlers so far: ``topic``, ``group``, ``id``, ``error``, ``error_type``."""
        return self._events.named("messaging.handler_failed")

    async def drained(self, timeout_s: float = 30.0) -> None:
        """Waits until the handlers of all groups have handled all published messages, including retries."""
        from millstream.testing.waiting import eventually

        async def done() -> bool:
            return not [topic for route in self._routes for topic in await self._topics_with_backlog(route)]

        await eventually(done, what="handlers to handle all messages", timeout_s=timeout_s)

    async def _topics_with_backlog(self, route: Route) -> list[str]:
        from millstream.errors import NoSuchStream
        from millstream.messaging import partition_streams

        topics = [route.topic] if route.partitions is None else partition_streams(route.topic, route.partitions)
        backlogged = []
        for topic in topics if route.group is not None else ():
            try:
                groups = await self._broker.group_info(topic)
            except NoSuchStream:
                continue  # nothing was published yet
            matching = [group for group in groups if group.name == route.group]
            if not matching or matching[0].pending or matching[0].lag != 0:
                backlogged.append(topic)
        return backlogged


@pytest.fixture
def millstream_url() -> str:
    """The URL of an embedded broker for this test only: ``local://test-<random>``."""
    return f"local://test-{uuid4().hex}"


@pytest.fixture
def millstream_observer() -> RecordedEvents:
    """The observer events that ``millstream_broker`` emits during the test (docs/reference/events.md)."""
    return RecordedEvents()


@pytest.fixture
def millstream_broker(millstream_url: str, millstream_observer: RecordedEvents) -> Iterator[Broker]:
    """The broker of ``millstream_url``. It is closed after the test, which deletes its streams."""
    from millstream import open_broker

    broker = open_broker(millstream_url, observer=millstream_observer)
    yield broker
    asyncio.run(broker.close())


@pytest.fixture
def millstream_ledger() -> DeliveryLedger:
    """Counts messages sent, confirmed and handled; ``balance()`` reports lost, duplicated and invented messages."""
    from millstream.testing.ledger import DeliveryLedger

    return DeliveryLedger()


RunRouter = Callable[..., AbstractAsyncContextManager[RunningRouter]]


@pytest.fixture
def run_router(millstream_broker: Broker, millstream_observer: RecordedEvents) -> RunRouter:
    """``async with run_router(router) as running: ...; await running.drained()``.

    Runs routers or buses without a broker on the test's broker. A failing handler fails the test, unless
    ``strict=False``.
    """
    from millstream import Router

    @asynccontextmanager
    async def run(*routers: Router, strict: bool = True) -> AsyncIterator[RunningRouter]:
        combined = Router(millstream_broker)
        combined.include(*routers)
        running = RunningRouter(millstream_broker, combined.routes(), millstream_observer)
        async with combined:
            yield running
        if strict and running.failures:
            first = running.failures[0]
            raise AssertionError(
                f"{len(running.failures)} messages failed, the first of {first['topic']!r}: "
                f"{first['error_type']}: {first['error']}. Pass strict=False if failures are expected."
            )

    return run
