"""A handler that blocks the event loop is named in the log while it blocks."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from millstream import open_broker
from millstream.messaging import Message, Publisher, Router, Subscriber
from millstream.messaging.consumer import blocked_loop
from millstream.testing import eventually


async def test_blocked_event_loop_is_logged_with_handler_and_stack(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()
    reported: list[str] = []

    async def charge_card(message: Message) -> None:
        deadline = time.monotonic() + 30
        while not reported and time.monotonic() < deadline:
            time.sleep(0.01)  # blocks the event loop until the watching thread has reported it
            reported.extend(record.getMessage() for record in caplog.records if "is blocked" in record.getMessage())
        done.set()

    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        subscriber = Subscriber(broker, group="g", group_start="0")
        task = asyncio.create_task(subscriber.consume("orders", charge_card))
        await publisher.publish("orders", Message(b"x"))
        await done.wait()
        await subscriber.close()
        await task
    assert "charge_card" in reported[0]
    assert "time.sleep(0.01)" in reported[0]


def run_competitor(url: str, handled: list[str], ready: threading.Event, stop: threading.Event) -> None:
    """A second member of the group, with an event loop of its own."""

    async def consume() -> None:
        async def handle(message: Message) -> None:
            handled.append("competitor")

        async with open_broker(url) as broker:
            member = Subscriber(broker, group="g", group_start="0", consumer="b", claim_min_idle_ms=300)
            task = asyncio.create_task(member.consume("orders", handle))
            await eventually(lambda: member.ready, what="the competitor to be ready")
            ready.set()
            await asyncio.to_thread(stop.wait)
            await member.close()
            await task

    asyncio.run(consume())


async def block_while_another_member_runs(url: str, max_blocked: threading.Event | None = None) -> list[str]:
    """Returns the consumers that handled the message, after its handler has blocked the event loop."""
    handled: list[str] = []
    ready, stop, done = threading.Event(), threading.Event(), asyncio.Event()
    competitor = threading.Thread(target=run_competitor, args=(url, handled, ready, stop))

    async def block(message: Message) -> None:
        competitor.start()
        assert ready.wait(30)
        if max_blocked is None:
            time.sleep(1.5)  # five times claim_min_idle_ms: this is the defect under test
        else:
            deadline = time.monotonic() + 30
            while not handled and time.monotonic() < deadline:
                time.sleep(0.01)
        handled.append("blocked")
        done.set()

    async with open_broker(url) as broker, Publisher(broker) as publisher:
        member = Subscriber(broker, group="g", group_start="0", consumer="a", claim_min_idle_ms=300)
        task = asyncio.create_task(member.consume("orders", block))
        await publisher.publish("orders", Message(b"x"))
        await done.wait()
        await member.close()
        stop.set()
        await task
        await asyncio.to_thread(competitor.join)
        assert (await broker.xpending("orders", "g")).count == 0
        assert not await broker.exists("{orders}.dlq")
    return handled


async def test_blocked_handler_keeps_its_message() -> None:
    assert await block_while_another_member_runs("local://blocked-keeps") == ["blocked"]


async def test_blocked_handler_keeps_its_message_on_redis(redis_url: str) -> None:
    assert await block_while_another_member_runs(redis_url) == ["blocked"]


async def test_hung_handler_loses_its_message_after_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "MAX_BLOCKED_S", 0.1)
    handled = await block_while_another_member_runs("local://blocked-hung", threading.Event())
    assert handled == ["competitor", "blocked"]


async def test_blocking_batch_handler_is_named(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[str] = []

    async def charge_cards(messages: list[Message]) -> None:
        deadline = time.monotonic() + 30
        while not reported and time.monotonic() < deadline:
            time.sleep(0.01)
            reported.extend(record.getMessage() for record in caplog.records if "is blocked" in record.getMessage())

    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        router = Router(broker, group_start="0")
        router.on("orders", group="g", batch=2)(charge_cards)
        router.on("bills", group="h")(print)
        await publisher.publish("orders", Message(b"x"), Message(b"y"))
        async with router:
            await eventually(lambda: reported, what="the report")
    assert len(reported) == 1, "the watch of the other group does not log it"
    assert "handler charge_cards of topic 'orders'" in reported[0]


async def test_hung_server_does_not_stop_heartbeats_for_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(watch: blocked_loop.ConsumerWatch, broker: object) -> None:
        if next(iter(watch._heartbeat().topics())).consumer == "hanging":  # type: ignore[union-attr]
            released.wait(30)
        else:
            renew(watch, broker)  # type: ignore[arg-type]

    renew = blocked_loop.ConsumerWatch.renew
    monkeypatch.setattr(blocked_loop.ConsumerWatch, "renew", hang)
    async with open_broker("local://") as broker, Publisher(broker) as publisher:
        hanging = Subscriber(broker, group="g", group_start="0", consumer="hanging", claim_min_idle_ms=300)
        other = asyncio.create_task(hanging.consume("other", print))
        await eventually(lambda: hanging.ready, what="the subscriber to be ready")
        await publisher.publish("other", Message(b"x"))
        assert await block_while_another_member_runs("local://blocked-beside-hung") == ["blocked"]
        released.set()
        await hanging.close()
        await other


async def test_watching_thread_ends_with_the_last_subscriber() -> None:
    async with open_broker("local://") as broker:
        member = Subscriber(broker, group="g", group_start="0")
        task = asyncio.create_task(member.consume("orders", print))
        await eventually(lambda: member.ready, what="the subscriber to be ready")
        await member.close()
        await task
    await eventually(
        lambda: all(thread.name != "millstream-loop-watch" for thread in threading.enumerate()),
        what="the end of the watching thread",
    )
