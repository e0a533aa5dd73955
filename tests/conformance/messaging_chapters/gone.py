"""Entries that are deleted or trimmed before a group has settled them: reported, not handled empty, not stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging_chapters.chapter import (
    Chapter,
    EventLog,
    HeldBack,
    RecordingHandler,
    nothing_pending,
    numbered,
    publish_one,
    running,
)
from messaging_chapters.recovery import abandon
from millstream.broker.broker import Broker
from millstream.broker.keys import companion_key
from millstream.broker.scripts import settle
from millstream.broker.scripts.script import script
from millstream.messaging import Message, Publisher, Retry
from millstream.testing.waiting import eventually


class GoneChapter(Chapter):
    async def test_trimmed_entry_is_reported_and_not_handled_without_fields(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(5))
        ids = await abandon(broker, topic, "dead", count=5)
        await broker.xdel(topic, ids[1:3])
        events = EventLog()
        recorder = RecordingHandler()
        async with running(events.observe(broker), topic, recorder):
            await recorder.have(3)
            await nothing_pending(broker, topic)
        assert sorted(recorder.payloads) == [b"0", b"3", b"4"]
        assert sum(events.all("messaging.entries_gone", "entries")) == 2

    async def test_entry_trimmed_before_its_due_time_is_reported(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(5))
        await broker.create_group(topic, "g", start="0")
        ids = [entry.id for entry in await broker.xreadgroup(topic, "g", "dead", count=4)]
        await broker.run(settle.delay, topic, "g", "dead", ids, times_delivered=1, delay_ms=0)
        await broker.xdel(topic, ids[1:3])
        events, recorder = EventLog(), RecordingHandler()
        async with running(events.observe(broker), topic, recorder):
            await recorder.have(3)
            await nothing_pending(broker, topic)
        assert sorted(recorder.payloads) == [b"0", b"3", b"4"]
        assert sum(events.all("messaging.entries_gone", "entries")) == 2
        assert not await broker.exists(companion_key(topic, "due:g"))

    @pytest.mark.parametrize("charged", [True, False])
    async def test_trimmed_entry_is_reported_when_it_is_delayed(
        self, broker: Broker, publisher: Publisher, topic: str, charged: bool
    ) -> None:
        """Nothing is left to redeliver: the entry is reported when it is delayed, and gets no due time."""
        entry_id = await publish_one(publisher, topic)

        async def too_late(message: Message) -> None:
            await broker.xdel(topic, [entry_id])
            message.settle(Retry(0, charged=charged))

        events, recorder = EventLog(), RecordingHandler(too_late)
        async with running(events.observe(broker), topic, recorder):
            await eventually(lambda: "messaging.retried" in events)
        assert (len(recorder.messages), events.all("messaging.retried", "entries")) == (1, [0])
        assert events.all("messaging.entries_gone", "entries") == [1]
        assert (await broker.xpending(topic, "g")).count == 0
        assert not await broker.exists(companion_key(topic, "due:g"))

    async def test_trimmed_entry_is_reported_when_it_is_returned(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """One entry whose handler is interrupted by close, and one that was not started."""
        await publisher.publish(topic, *numbered(2))

        async def hang(message: Message) -> None:
            await asyncio.Event().wait()

        async def both_are_pending() -> bool:
            return (await broker.xpending(topic, "g")).count == 2

        events, recorder = EventLog(), RecordingHandler(hang)
        async with running(
            events.observe(broker), topic, recorder, ordered_by_key=lambda message: "one key", close_timeout_ms=50
        ):
            await recorder.have(1)
            await eventually(both_are_pending)
            await broker.xdel(topic, [entry.id for entry in await broker.xrange(topic)])
        assert sum(events.all("messaging.entries_gone", "entries")) == 2
        assert (await broker.xpending(topic, "g")).count == 0

    async def test_heartbeat_reports_trimmed_entries(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        entry_id = await publish_one(publisher, topic)
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        events, recorder = EventLog(), RecordingHandler(wait)
        async with running(events.observe(broker), topic, recorder, claim_min_idle_ms=1_200):
            await recorder.have(1)
            await broker.xdel(topic, [entry_id])
            await eventually(lambda: events.all("messaging.entries_gone", "entries") == [1])
            go_on.set()
            await eventually(lambda: "messaging.ack_refused" in events)
        assert (await broker.xpending(topic, "g")).count == 0

    async def test_entry_trimmed_while_it_waits_here_is_handled_and_not_reported_as_lost(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """This consumer has received it, and no other consumer can claim it."""
        await publisher.publish(topic, *numbered(3))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        events, recorder = EventLog(), RecordingHandler(wait)
        options: dict[str, Any] = {"claim_min_idle_ms": 600, "ordered_by_key": lambda message: "one key"}
        async with running(events.observe(broker), topic, recorder, **options):
            await recorder.have(1)
            await broker.xdel(topic, [entry.id for entry in await broker.xrange(topic, count=2)])
            await eventually(lambda: sum(events.all("messaging.entries_gone", "entries")) == 2)
            await asyncio.sleep(0.5)  # further heartbeats
            go_on.set()
            await recorder.have(3)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"0", b"1", b"2"]
        assert "messaging.lost" not in events

    async def test_entry_trimmed_before_it_is_counted_is_reported_and_handled_once_more(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """This consumer has already received the entry, and no other consumer can claim it."""
        await publisher.publish(topic, Message(b"x"))
        (entry_id,) = await abandon(broker, topic, "dead", count=1)
        events, recorder = EventLog(), RecordingHandler()
        counting = HeldBack(broker, script("settle").sha)
        async with running(events.observe(broker, counting.transport), topic, recorder):
            await eventually(lambda: counting.words, what="a count in flight")
            await broker.xdel(topic, [entry_id])
            counting.let_through.set()
            await recorder.have(1)
            await eventually(lambda: "messaging.ack_refused" in events)
        assert events.all("messaging.entries_gone", "entries") == [1]
        assert (await broker.xpending(topic, "g")).count == 0
