"""Ready is asked, failed is told; whatever is asked, the answer comes in time and holds no secret."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream import Publisher, Router, Subscriber, open_broker
from millstream.assignment import AssignmentClient
from millstream.errors import InvalidArgument
from millstream.messaging import Message
from millstream.observe import service as health
from millstream.observe.service import Failures, check_watched, health_of, name_of


class Thing:
    def __init__(self, **parts: bool) -> None:
        self.readiness = parts

    @property
    def ready(self) -> bool:
        return all(self.readiness.values())


async def test_what_is_not_ready_names_its_parts() -> None:
    found = await health_of("router", Thing(orders=True, refunds=False))
    assert found.shown() == {"name": "router", "ready": False, "not_ready": ["refunds"]}
    assert (await health_of("router", Thing(orders=True))).ready


async def test_functions_of_the_service_may_be_async_and_may_fail() -> None:
    async def warm() -> bool:
        return True

    def broken() -> bool:
        raise RuntimeError("password=s3cret")

    assert (await health_of("cache", warm)).ready
    found = await health_of("cache", broken)
    assert found.shown() == {"name": "cache", "ready": False, "error": "RuntimeError"}


async def test_nobody_waits_for_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.01)

    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    assert (await health_of("x", hangs)).shown() == {"name": "x", "ready": False, "error": "TimeoutError"}


async def test_a_task_that_ended_by_an_error_has_failed() -> None:
    async def ends(error: Exception | None) -> None:
        if error is not None:
            raise error

    fine, ill = asyncio.create_task(ends(None)), asyncio.create_task(ends(ValueError("x")))
    running = asyncio.create_task(asyncio.Event().wait())
    await asyncio.wait([fine, ill])
    assert (await health_of("t", running)).ready
    assert (await health_of("t", fine)).shown() == {"name": "t", "ready": False}
    assert (await health_of("t", ill)).shown() == {"name": "t", "ready": False, "failed": True, "error": "ValueError"}
    running.cancel()


async def test_everything_that_a_service_runs_can_be_watched_by_a_name_that_stays() -> None:
    async with open_broker("local://health") as broker:
        subscriber = Subscriber(broker, group="billing", group_start="0")
        publisher = Publisher(broker)
        things: list[Any] = [Router(broker), subscriber, publisher, AssignmentClient(broker, "s"), broker]
        names = [name_of(check_watched(thing)) for thing in things]
        assert names == ["router", "subscriber of billing", "publisher", "assignment client", "broker"]
        assert [(await health_of("x", thing)).ready for thing in things] == [False, False, True, False, True]
        await publisher.publish("orders", Message(b"1"))
        assert publisher.readiness == {"orders": True}
        await publisher.close()
        assert not (await health_of("publisher", publisher)).ready
    found = await health_of("broker", broker)
    assert found.shown() == {"name": "broker", "ready": False, "error": "BrokerClosed"}


def test_a_member_can_be_watched_before_the_loop_runs_and_nonsense_cannot() -> None:
    check_watched(AssignmentClient(open_broker("local://"), "s"))
    with pytest.raises(InvalidArgument, match="Subscriber, Router"):
        check_watched(7)


def test_a_subscription_that_failed_is_forgiven_when_it_begins_again() -> None:
    failures = Failures()
    subscription = {"topic": "a\x1bb", "group": "billing", "consumer": "c"}
    failures("messaging.subscription_failed", error="s3cret", error_type="PermissionDenied", **subscription)
    (found,) = failures.statuses()
    assert found.shown() == {
        "name": r"subscription a\x1bb of group billing",
        "ready": False,
        "failed": True,
        "error": "PermissionDenied",
    }
    failures("messaging.subscribed", topic="other", group="billing", consumer="c")
    assert failures.statuses()
    failures("messaging.subscribed", **subscription)
    assert not failures.statuses()


def test_failures_are_bounded() -> None:
    failures = Failures()
    for number in range(10_000):
        failures("messaging.subscription_failed", topic=f"t{number}", group="g", consumer="c", error_type="E")
    assert len(failures.statuses()) == health.MAX_FAILURES
