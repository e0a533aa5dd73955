"""Parts that no task waits for: they go on after errors, and a cancelled start leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Router, open_broker
from millstream.assignment import AssignedSubscriber
from millstream.assignment import subscriber as assigned
from millstream.broker.scripts import retention
from millstream.errors import PermissionDenied
from millstream.messaging import supervision
from millstream.messaging.consumer.subscriber import Messages
from millstream.messaging.housekeeping import Housekeeper, Pace
from millstream.model import Backoff
from millstream.testing import eventually

QUICK = Pace(declare_ms=5, delete_ms=5, sizes_ms=5)


@pytest.fixture(autouse=True)
def restart_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "RESTART", Backoff(initial_ms=1, max_ms=1))


async def handle(message: Message) -> None:
    """Acknowledges."""


async def test_retention_goes_on_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []

    async def check(self: Housekeeper) -> None:
        passes.append("sizes")
        raise OSError("planted")

    monkeypatch.setattr(Housekeeper, "_check_others", check)
    monkeypatch.setattr("millstream.messaging.housekeeping.PACE", QUICK)
    async with open_broker(f"local://{uuid4().hex}", max_stream_len=None) as broker:
        router = Router(broker, group_start="0")
        router.on("orders", group="billing")(handle)
        async with router:
            await eventually(lambda: len(passes) > 2)


async def test_policy_stays_declared_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Housekeeper) -> None:
        raise OSError("planted")

    monkeypatch.setattr(Housekeeper, "_check_others", fails)
    async with open_broker(f"local://{uuid4().hex}", max_stream_len=None) as broker:
        router = Router(broker, group_start="0")
        router.on("orders", group="billing", keep="1d")(handle)
        with pytest.raises(OSError, match="planted"):
            await Housekeeper(broker, router.routes(), pace=QUICK).run()
        assert len(await broker.run(retention.policies, "orders")) == 1


async def test_lost_announcements_are_announced_after_a_permission_was_corrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[str] = []
    announce = assigned.announce_streams

    async def refused_at_first(*args: Any) -> set[str]:
        checks.append("check")
        if 1 < len(checks) < 4:
            raise PermissionDenied("NOPERM planted")
        return await announce(*args)

    monkeypatch.setattr(assigned, "announce_streams", refused_at_first)
    async with open_broker(f"local://{uuid4().hex}") as broker, asyncio.timeout(20):
        router = Router(broker, group_start="0")
        router.on("orders", group="billing", partitions=2)(handle)
        async with router:
            [(_, reader)] = router._subscribers
            running: AssignedSubscriber = reader._running  # type: ignore[union-attr]
            monkeypatch.setattr(type(running.client.settings), "renew_interval_ms", 5)
            running._announcements_seen = None

            async def unseen() -> None:
                while len(checks) < 5:
                    running._announcements_seen = None
                    await asyncio.sleep(0.005)

            await unseen()


async def test_router_is_closed_if_its_start_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "ready", property(lambda self: False))
    async with open_broker(f"local://{uuid4().hex}") as broker:
        router = Router(broker, group_start="0")
        router.on("orders", group="billing")(handle)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), router:
                raise AssertionError("the block must not begin")
        assert not [task for task in asyncio.all_tasks() if "millstream" in task.get_name()]


async def test_iterator_begins_after_its_first_call_was_cancelled() -> None:
    class Source:
        abandoned = False

        async def next_message(self) -> Message:
            return Message(b"1")

        async def close(self, timeout_s: float) -> None:
            """Nothing is open."""

    begun: list[str] = []
    rival_ended = asyncio.Event()

    async def begin() -> None:
        await rival_ended.wait()
        begun.append("begun")

    messages = Messages(Source(), begin, lambda: None, 1.0)
    first = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    rival_ended.set()
    await anext(messages)
    assert begun == ["begun"]
