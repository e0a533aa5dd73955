"""A handler that blocks the event loop for longer than a lease keeps its member's streams."""

from __future__ import annotations

import asyncio
import threading
import time
from uuid import uuid4

import pytest

from millstream import open_broker
from millstream.assignment import AssignmentClient, PartitionedSubscriber, Settings
from millstream.messaging import Message, Publisher, Router
from millstream.messaging.consumer import blocked_loop
from millstream.testing import eventually

SHORT = Settings(lease_ms=600, renew_interval_ms=200, sweep_interval_ms=50, go_locks=False)


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", SHORT)


class Competitor:
    """A second member of the service, with an event loop of its own."""

    def __init__(self, url: str) -> None:
        self.handled: list[str] = []
        self.owned: set[str] = set()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(url)))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self, url: str) -> None:
        async with open_broker(url) as broker:
            router = Router(broker, group_start="0", block_ms=100)

            @router.on("orders", group="g", partitions=1)
            async def handle(message: Message) -> None:
                self.handled.append("competitor")

            running = asyncio.create_task(router.run(handle_signals=False))

            def has_joined() -> bool:
                readers = [each for _, each in router._subscribers if isinstance(each, PartitionedSubscriber)]
                running = readers[0]._running if readers else None
                return running is not None and running.client.ready

            await eventually(has_joined, what="the competitor to join")
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)
            await router.close()
            await running


async def block_longer_than_the_lease(url: str) -> list[str]:
    competitor = Competitor(url)
    handled = competitor.handled
    done = asyncio.Event()
    async with open_broker(url) as broker, Publisher(broker, partitions={"orders": 1}) as publisher:
        router = Router(broker, group_start="0", block_ms=100)

        @router.on("orders", group="g", partitions=1)
        async def block(message: Message) -> None:
            competitor.start()
            time.sleep(3)  # five leases: this is the defect under test
            handled.append("blocked")
            done.set()

        await publisher.publish("orders", Message(b"x", {"key": "a"}))
        async with router:
            await done.wait()
            await asyncio.sleep(0.5)
        competitor.stop()
        assert (await broker.xpending("orders.p0", "g")).count == 0
    return handled


async def test_blocked_member_keeps_its_partition() -> None:
    assert await block_longer_than_the_lease(f"local://{uuid4().hex}") == ["blocked"]


async def test_blocked_member_keeps_its_partition_on_redis(redis_url: str) -> None:
    assert await block_longer_than_the_lease(redis_url) == ["blocked"]


async def test_hung_member_loses_its_lease_after_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "MAX_BLOCKED_S", 0.1)
    async with open_broker(f"local://{uuid4().hex}") as broker:
        client = AssignmentClient(broker, "svc", settings=SHORT)
        client.start()
        await client.announce("s")
        await eventually(lambda: "s" in client.owned)
        token = client.owned["s"]
        time.sleep(1.5)
        assert client.certain_until(token) < time.monotonic()
        await client.close()
