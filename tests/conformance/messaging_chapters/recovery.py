"""Recovery: entries of dead consumers are claimed, and possible poison messages are isolated."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from messaging_chapters.chapter import (
    QUICK,
    Chapter,
    EventLog,
    RecordingHandler,
    nothing_pending,
    numbered,
    running,
)
from millstream.broker.broker import Broker
from millstream.broker.keys import companion_key
from millstream.broker.scripts import recovery
from millstream.broker.scripts.script import script
from millstream.errors import NoSuchGroup, OutOfMemory
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.consumer.claims import MAX_SCAN
from millstream.testing.faults import Fault, FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Batch, Command


async def abandon(broker: Broker, topic: str, consumer: str, *, count: int, times: int = 1) -> list[Any]:
    """Reads entries as a consumer that is then killed: they stay pending, with a long idle time."""
    await broker.create_group(topic, "g", start="0")
    deliveries = await broker.xreadgroup(topic, "g", consumer, count=count)
    ids = [delivery.id for delivery in deliveries]
    await broker.xclaim_ids(topic, "g", consumer, ids, min_idle_ms=0, time_ms=1, retry_count=times)
    return ids


async def _pending_ids(broker: Broker, topic: str, expected: list[Any]) -> bool:
    return [entry.id for entry in await broker.xpending_range(topic, "g")] == expected


def reads(request: Command | Batch) -> bool:
    return isinstance(request, Command) and request.args[0] == b"XREADGROUP"


class RecoveryChapter(Chapter):
    async def test_entries_of_a_dead_consumer_are_claimed(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(5))
        await abandon(broker, topic, "dead", count=5)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(5)
            await nothing_pending(broker, topic)
        assert sorted(recorder.payloads) == [b"%d" % n for n in range(5)]
        assert {message.times_delivered for message in recorder.messages} == {2}

    async def test_released_entries_of_a_dead_consumer_are_claimed_before_their_idle_time(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """The claim time is an hour; entries of the running consumer stay with it."""
        await publisher.publish(topic, *numbered(7))
        await broker.create_group(topic, "g", start="0")
        await broker.xreadgroup(topic, "g", "dead", count=5)
        held = [delivery.id for delivery in await broker.xreadgroup(topic, "g", "alive", count=2)]
        assert await broker.run(recovery.release, topic, "g", "dead", page=2) == 5
        assert await broker.run(recovery.release, topic, "g", "unknown") == 0
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, claim_min_idle_ms=3_600_000):
            await recorder.have(5)
            await eventually(lambda: _pending_ids(broker, topic, held))
        assert sorted(recorder.payloads) == [b"%d" % n for n in range(5)]
        assert {message.times_delivered for message in recorder.messages} == {2}, "the delivery count was kept"

    async def test_release_without_a_group_raises(self, broker: Broker, topic: str) -> None:
        with pytest.raises(NoSuchGroup):
            await broker.run(recovery.release, topic, "g", "dead")

    @pytest.mark.parametrize(("at_a_time", "count"), [(20, 10), (20, 50), (2, 50), (1, 1)])
    async def test_a_claim_and_a_read_together_never_exceed_max_in_flight(
        self, broker: Broker, publisher: Publisher, topic: str, at_a_time: int, count: int
    ) -> None:
        """New messages arrive at the same moment as the first claimed ones: the blocking read was sent before the
        claim."""
        await publisher.publish(topic, *numbered(100))
        await abandon(
            broker, topic, "dead", count=100, times=0
        )  # as after a return: nothing prevents them from starting
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        async def held() -> int:
            return (await broker.xpending(topic, "g")).consumers.get("me", 0)

        async def claimed() -> bool:
            return await held() > 0

        recorder = RecordingHandler(wait)
        options = {"consumer": "me", "max_in_flight": at_a_time, "count": count}
        async with running(broker, topic, recorder, **options):
            await eventually(claimed, what="the first abandoned ones", timeout_s=60)
            await publisher.publish(topic, *numbered(100, 100))
            await eventually(lambda: recorder.running >= at_a_time, what="as many as may run", timeout_s=60)
            for _ in range(30):
                assert await held() <= at_a_time
                await asyncio.sleep(0.01)
            go_on.set()
            await recorder.have(200, timeout_s=120)
            await nothing_pending(broker, topic)
        assert Counter(recorder.payloads) == {b"%d" % n: 1 for n in range(200)}
        assert recorder.max_running <= at_a_time

    async def test_abandoned_entries_of_a_busy_stream_are_claimed(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Under constant load, with more pending entries than one scan covers, and with entries of running consumers
        first."""
        living, dead = MAX_SCAN + 200, 40
        for at in range(0, living + dead, 200):
            await publisher.publish(topic, *numbered(min(200, living + dead - at), at))
        await broker.create_group(topic, "g", start="0")
        alive = await broker.xreadgroup(topic, "g", "alive", count=living)
        lost = await abandon(broker, topic, "dead", count=dead)
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                await publisher.publish(topic, Message(b"load"))

        loading = asyncio.create_task(load())
        recorder = RecordingHandler()
        try:
            async with running(broker, topic, recorder, max_in_flight=20, count=10):
                await eventually(
                    lambda: {m.id for m in recorder.messages if m.times_delivered == 2} == set(lost),
                    what="all abandoned entries",
                    timeout_s=60,
                )
        finally:
            stop.set()
            await loading
        assert (await broker.xpending(topic, "g")).consumers["alive"] == len(alive)

    async def test_own_pending_entries_are_recovered_at_the_start(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(250))
        await broker.create_group(topic, "g", start="0")
        await broker.xreadgroup(topic, "g", "me", count=200)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, consumer="me", claim_min_idle_ms=3_600_000):
            await recorder.have(250)
            await nothing_pending(broker, topic)
        assert sorted(recorder.payloads, key=int) == [b"%d" % n for n in range(250)]

    async def test_a_read_whose_answer_was_lost_loses_nothing(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(30))
        lost: list[int] = []

        def third_read(request: Command | Batch) -> Fault | None:
            if reads(request):
                lost.append(1)
                return Fault.answer_lost() if len(lost) in (1, 3) else None
            return None

        cut = Broker(FaultyTransport(broker.transport, third_read), broker.context)
        recorder = RecordingHandler()
        async with running(cut, topic, recorder, count=10, claim_min_idle_ms=3_600_000):
            await recorder.have(30)
            await nothing_pending(broker, topic)
        assert Counter(recorder.payloads) == Counter(b"%d" % n for n in range(30))

    async def test_outcomes_survive_a_broker_that_is_away(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(20))
        away = True

        def scripts_fail(request: Command | Batch) -> Fault | None:
            settles = isinstance(request, Command) and request.args[0] == b"EVALSHA" and b"ack" in request.args
            return Fault.refused() if settles and away else None

        flaky = Broker(FaultyTransport(broker.transport, scripts_fail), broker.context)
        recorder = RecordingHandler()
        async with running(flaky, topic, recorder):
            await recorder.have(20)
            assert (await broker.xpending(topic, "g")).count == 20
            away = False
            await nothing_pending(broker, topic)
        assert len(recorder.messages) == 20

    async def test_dead_letter_that_is_refused_does_not_delay_other_outcomes(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(30))
        full = True

        def refuses(request: Command | Batch) -> Fault | None:
            dead_letters = isinstance(request, Command) and script("settle_dead_letter").sha in request.args
            return Fault(before=OutOfMemory("OOM planted")) if dead_letters and full else None

        async def rejects(message: Message) -> None:
            if message.payload == b"3":
                await message.reject("no")

        async def one_left() -> bool:
            return (await broker.xpending(topic, "g")).count == 1

        recorder = RecordingHandler(rejects)
        async with running(Broker(FaultyTransport(broker.transport, refuses), broker.context), topic, recorder):
            await recorder.have(30)
            await eventually(one_left)
            full = False
            await nothing_pending(broker, topic)
        assert await broker.xlen(companion_key(topic, "dlq")) == 1

    @pytest.mark.parametrize(("times", "at_a_time"), [(1, 30), (2, 1)])
    async def test_entries_that_were_redelivered_before_a_crash_run_one_at_a_time(
        self, broker: Broker, publisher: Publisher, topic: str, times: int, at_a_time: int
    ) -> None:
        """The others were in flight in one crash: they run in parallel once more, counted before they start."""
        await publisher.publish(topic, *numbered(30))
        await abandon(broker, topic, "dead", count=30, times=times)

        async def wait(message: Message) -> None:
            await asyncio.sleep(0.001 if at_a_time == 1 else 0.1)

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder):
            await recorder.have(30)
            await nothing_pending(broker, topic)
        assert recorder.max_running == at_a_time
        assert {message.times_delivered for message in recorder.messages} == {times + 1}

    async def test_an_isolated_entry_is_counted_before_it_starts_and_others_are_not(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(10))
        ids = await abandon(broker, topic, "dead", count=10, times=2)
        counts: list[dict[Any, int]] = []

        async def look(message: Message) -> None:
            counts.append({entry.id: entry.times_delivered for entry in await broker.xpending_range(topic, "g")})

        async with running(broker, topic, RecordingHandler(look)):
            await eventually(lambda: len(counts) == 10)
            await nothing_pending(broker, topic)
        for at, (entry_id, item) in enumerate(zip(ids, counts, strict=True)):
            assert item == {entry_id: 3, **dict.fromkeys(ids[at + 1 :], 2)}

    async def test_entries_with_fewer_deliveries_start_first(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(6))
        await abandon(broker, topic, "dead", count=2, times=3)
        await abandon(broker, topic, "dead", count=4, times=1)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(6)
        assert recorder.payloads[-2:] == [b"0", b"1"] or recorder.payloads[0] == b"0"
        assert recorder.payloads[1:5] == [b"2", b"3", b"4", b"5"] or recorder.payloads[:4] == [b"2", b"3", b"4", b"5"]

    async def test_message_that_killed_max_deliveries_processes_is_dead_lettered(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(3))
        await abandon(broker, topic, "dead", count=1, times=5)
        await abandon(broker, topic, "dead", count=2, times=1)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(2)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"1", b"2"]
        (letter,) = await broker.xrange(companion_key(topic, "dlq"))
        assert letter.fields[b"dlq.deliveries"] == b"5"
        assert letter.fields[b"dlq.error_type"].endswith(b"DeliveriesExhausted")

    async def test_reader_without_replies_is_detected_and_reads_again(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        hang = True

        def hangs(request: Command | Batch) -> Fault | None:
            return Fault(delay_s=3600) if reads(request) and hang else None

        events = EventLog()
        stuck = events.observe(broker, FaultyTransport(broker.transport, hangs))
        recorder = RecordingHandler()
        async with running(stuck, topic, recorder, grace_ms=100) as subscriber:
            await eventually(lambda: "messaging.reader_stalled" in events)
            assert not subscriber.ready
            hang = False
            await publisher.publish(topic, Message(b"x"))
            await recorder.have(1)
            await eventually(lambda: subscriber.ready)

    async def test_dead_consumers_without_pending_entries_are_removed(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))
        await broker.create_group(topic, "g", start="0")
        await broker.create_consumer(topic, "g", "empty")
        await broker.xreadgroup(topic, "g", "holds one", count=1)

        async def names() -> set[str]:
            (group,) = await broker.group_info(topic)
            return {consumer.name for consumer in group.consumers}

        async def only_the_holder() -> bool:
            return await names() == {"holds one", "me"}

        recorder = RecordingHandler()
        quick: dict[str, Any] = {"consumer": "me", "dead_consumer_ms": 200, "claim_min_idle_ms": 3_600_000}
        async with running(broker, topic, recorder, **quick):
            await eventually(only_the_holder)
            await asyncio.sleep(0.5)  # longer than dead_consumer_ms, and several scans
            assert await names() == {"holds one", "me"}
        assert recorder.messages == []

    async def test_closing_during_recovery_returns_all_entries(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(20))
        await abandon(broker, topic, "dead", count=20, times=2)
        subscriber = Subscriber(broker, group="g", consumer="me", **QUICK)
        started = asyncio.Event()

        async def wait(message: Message) -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(subscriber.consume(topic, wait))
        await started.wait()
        await subscriber.close(timeout_ms=0)
        await task

        pending = await broker.xpending_range(topic, "g")
        assert len(pending) == 20
        assert sorted(entry.times_delivered for entry in pending) == [2] * 19 + [3]
        assert all(entry.idle_ms > 3_600_000 for entry in pending if entry.consumer == "me")
