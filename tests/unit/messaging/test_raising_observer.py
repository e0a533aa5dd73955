"""An observer that raises is a mistake of the program. It costs no add, no message, no lease and no background task."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Router, open_broker
from millstream.assignment import AssignmentClient, StreamAdded
from millstream.broker import Broker
from millstream.errors import BrokerClosed
from millstream.messaging import RetentionPolicy
from millstream.messaging.housekeeping import Housekeeper, KeptStream, Pace
from millstream.messaging.middleware import metrics
from millstream.model.policies import guarded
from millstream.observe.metrics import combine_observers
from millstream.testing import eventually

QUICK = Pace(declare_ms=5, delete_ms=5, sizes_ms=5)


def fails(name: str, /, **facts: Any) -> None:
    raise LookupError(name)


def new_broker() -> Broker:
    return open_broker(f"local://{uuid4().hex}", max_stream_len=5, hard_max_stream_len=5, observer=fails)


def test_each_event_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = guarded(fails)
    for _ in range(3):
        observer("broker.retry", attempt=1)
    observer("broker.trim_failed")
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert guarded(observer) is observer


def test_other_observers_receive_an_event_after_one_has_raised() -> None:
    received: list[str] = []
    combine_observers([fails, lambda name, /, **_: received.append(name)])("broker.retry")
    assert received == ["broker.retry"]


async def test_add_returns_the_id_of_the_entry_it_stored() -> None:
    async with new_broker() as broker:
        await broker.create_group("orders", "billing", start="0")
        ids = [await broker.xadd("orders", {"n": number}) for number in range(100)]  # drops undelivered entries
        assert (await broker.xrange("orders"))[-1].id == ids[-1]


async def test_retention_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []

    async def declare(self: Housekeeper, stream: KeptStream) -> None:
        passes.append(stream.name)
        raise BrokerClosed("planted") if len(passes) > 3 else OSError("planted")

    monkeypatch.setattr(Housekeeper, "_declare", declare)
    async with new_broker() as broker:
        router = Router(broker, group_start="0")
        router.on("orders", group="billing", keep=RetentionPolicy(max_len=10))(lambda message: None)
        async with asyncio.timeout(20):
            await Housekeeper(broker, router.routes(), pace=QUICK).run()
    assert len(passes) == 4


async def test_member_takes_streams() -> None:
    async with new_broker() as broker, asyncio.timeout(20):
        client = AssignmentClient(broker, "svc", observer=fails)
        notifications = client.start()
        await client.announce("orders")
        assert isinstance(await anext(aiter(notifications)), StreamAdded)
        await client.close()


async def test_message_is_acknowledged_by_a_router_with_metrics() -> None:
    handled: list[int] = []

    async def handle(message: Message) -> None:
        handled.append(message.times_delivered)

    async with new_broker() as broker:
        await broker.xadd("orders", {"payload": "1"})
        router = Router(broker, group_start="0")
        router.use(metrics(fails))
        router.on("orders", group="billing")(handle)
        async with router:

            async def settled() -> bool:
                return bool(handled) and (await broker.xpending("orders", "billing")).count == 0

            await eventually(settled)
    assert handled == [1]
