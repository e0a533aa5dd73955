"""Fixtures for people's tests, loaded by pytest wherever this package is installed (entry point ``pytest11``).

They need no plugin for async tests, and none is preferred: an embedded broker is made and closed without a loop. What
is heavy is imported when a fixture is first asked for, not when pytest starts.
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
    from millstream.messaging import Route
    from millstream.testing.ledger import DeliveryLedger


class RecordedFacts(list[tuple[str, dict[str, Any]]]):
    """What the broker of this test was told to tell: an observer, and a list of what it heard."""

    def __call__(self, name: str, /, **facts: Any) -> None:
        self.append((name, facts))

    def named(self, name: str) -> list[dict[str, Any]]:
        """The facts of one name, such as ``messaging.buried``."""
        return [facts for one, facts in self if one == name]


class RunningRouter:
    """A router at work, in a test."""

    def __init__(self, broker: Broker, routes: list[Route], facts: RecordedFacts) -> None:
        self._broker = broker
        self._routes = routes
        self._facts = facts

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What handlers have raised so far: ``topic``, ``group``, ``id``, ``error``, ``error_type``."""
        return self._facts.named("messaging.handler_failed")

    async def drained(self, timeout_s: float = 30.0) -> None:
        """Returns when every handler with a group is done with all that was published, retries included."""
        from millstream.testing.waiting import eventually

        async def done() -> bool:
            return not [place for route in self._routes for place in await self._left(route)]

        await eventually(done, what="handlers to be done with everything", timeout_s=timeout_s)

    async def _left(self, route: Route) -> list[str]:
        from millstream.errors import NoSuchStream
        from millstream.messaging import partition_streams

        topics = [route.topic] if route.partitions is None else partition_streams(route.topic, route.partitions)
        left = []
        for topic in topics if route.group is not None else ():
            try:
                groups = await self._broker.group_info(topic)
            except NoSuchStream:
                continue  # nothing was ever published to it
            mine = [group for group in groups if group.name == route.group]
            if not mine or mine[0].pending or mine[0].lag != 0:
                left.append(topic)
        return left


@pytest.fixture
def millstream_url() -> str:
    """An embedded broker of this test's own: ``local://<something that nobody else has>``."""
    return f"local://test-{uuid4().hex}"


@pytest.fixture
def millstream_facts() -> RecordedFacts:
    """What was told while the test ran (docs/reference/facts.md), by ``millstream_broker``."""
    return RecordedFacts()


@pytest.fixture
def millstream_broker(millstream_url: str, millstream_facts: RecordedFacts) -> Iterator[Broker]:
    """The broker behind ``millstream_url``, closed after the test. Its streams are gone then."""
    from millstream import open_broker

    broker = open_broker(millstream_url, observer=millstream_facts)
    yield broker
    asyncio.run(broker.close())


@pytest.fixture
def millstream_ledger() -> DeliveryLedger:
    """Counts what was sent, confirmed and handled; ``balance()`` says what was lost, duplicated or invented."""
    from millstream.testing.ledger import DeliveryLedger

    return DeliveryLedger()


RunRouter = Callable[..., AbstractAsyncContextManager[RunningRouter]]


@pytest.fixture
def run_router(millstream_broker: Broker, millstream_facts: RecordedFacts) -> RunRouter:
    """``async with run_router(router) as running: ...; await running.drained()``: runs routers or buses that have no
    broker on the test's one. A handler that fails fails the test, unless ``strict=False``."""
    from millstream import Router

    @asynccontextmanager
    async def run(*routers: Router, strict: bool = True) -> AsyncIterator[RunningRouter]:
        whole = Router(millstream_broker)
        whole.include(*routers)
        running = RunningRouter(millstream_broker, whole.routes(), millstream_facts)
        async with whole:
            yield running
        if strict and running.failures:
            first = running.failures[0]
            raise AssertionError(
                f"{len(running.failures)} messages failed, the first of {first['topic']!r}: "
                f"{first['error_type']}: {first['error']}. Pass strict=False where that is meant to be."
            )

    return run
