"""Readiness is checked with a time limit, failures come from events, and no status contains the text of an error."""

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


async def test_status_names_the_parts_that_are_not_ready() -> None:
    status = await health_of("router", Thing(orders=True, refunds=False))
    assert status.as_json() == {"name": "router", "ready": False, "not_ready": ["refunds"]}
    assert (await health_of("router", Thing(orders=True))).ready


async def test_functions_of_the_service_may_be_async_and_may_fail() -> None:
    async def warm() -> bool:
        return True

    def broken() -> bool:
        raise RuntimeError("password=s3cret")

    assert (await health_of("cache", warm)).ready
    status = await health_of("cache", broken)
    assert status.as_json() == {"name": "cache", "ready": False, "error": "RuntimeError"}


async def test_health_check_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.01)

    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    assert (await health_of("x", hangs)).as_json() == {"name": "x", "ready": False, "error": "TimeoutError"}


async def test_task_that_ended_with_an_error_has_failed() -> None:
    async def ends(error: Exception | None) -> None:
        if error is not None:
            raise error

    fine, ill = asyncio.create_task(ends(None)), asyncio.create_task(ends(ValueError("x")))
    running = asyncio.create_task(asyncio.Event().wait())
    await asyncio.wait([fine, ill])
    assert (await health_of("t", running)).ready
    assert (await health_of("t", fine)).as_json() == {"name": "t", "ready": False}
    assert (await health_of("t", ill)).as_json() == {"name": "t", "ready": False, "failed": True, "error": "ValueError"}
    running.cancel()


async def test_watched_objects_have_names_that_survive_a_restart() -> None:
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
    status = await health_of("broker", broker)
    assert status.as_json() == {"name": "broker", "ready": False, "error": "BrokerClosed"}


def test_member_can_be_watched_before_the_loop_runs_and_a_number_cannot() -> None:
    check_watched(AssignmentClient(open_broker("redis://127.0.0.1:1"), "s"))
    with pytest.raises(InvalidArgument, match="Subscriber, Router"):
        check_watched(7)


def test_failed_subscription_is_removed_when_it_is_joined_again() -> None:
    failures = Failures()
    subscription = {"topic": "a\x1bb", "group": "billing", "consumer": "c"}
    failures("messaging.subscription_failed", error="s3cret", error_type="PermissionDenied", **subscription)
    (status,) = failures.statuses()
    assert status.as_json() == {
        "name": r"subscription a\x1bb of group billing",
        "ready": False,
        "failed": True,
        "error": "PermissionDenied",
    }
    failures("messaging.subscribed", topic="other", group="billing", consumer="c")
    assert failures.statuses()
    failures("messaging.subscribed", **subscription)
    assert not failures.statuses()


def test_stream_owned_by_another_member_has_not_failed() -> None:
    failures = Failures()
    subscription = {"topic": "s1", "group": "g", "consumer": "a"}
    failures("messaging.subscription_failed", error="...", error_type="StaleOwner", **subscription)
    assert not failures.statuses()
    failures("messaging.subscription_failed", error="...", error_type="PermissionDenied", **subscription)
    assert failures.statuses()
    failures("assignment.unsubscribed", service="s", member="a", **subscription)
    assert not failures.statuses()


def test_failures_are_bounded() -> None:
    failures = Failures()
    for number in range(10_000):
        failures("messaging.subscription_failed", topic=f"t{number}", group="g", consumer="c", error_type="E")
    assert len(failures.statuses()) == health.MAX_FAILURES
