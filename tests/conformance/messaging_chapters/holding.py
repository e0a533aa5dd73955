"""Messages in flight: heartbeats, fencing, delays, and return to the group."""

from __future__ import annotations

import asyncio

import pytest

from messaging_chapters.chapter import (
    QUICK,
    Chapter,
    EventLog,
    HeldBack,
    RecordingHandler,
    nothing_pending,
    numbered,
    publish_one,
    running,
)
from millstream.broker.broker import Broker
from millstream.broker.context import Context
from millstream.broker.keys import companion_key
from millstream.broker.scripts import settle
from millstream.broker.scripts.script import script
from millstream.messaging import Message, Publisher, Subscriber
from millstream.messaging.consumer import subscription
from millstream.testing.waiting import eventually


class HoldingChapter(Chapter):
    async def test_a_long_handler_keeps_its_message(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        """A handler of one second once ran six times. Here it takes more than twice the claim time, which is long
        enough that a busy machine does not delay three heartbeats."""
        await publisher.publish(topic, Message(b"long"))

        async def takes_long(message: Message) -> None:
            await asyncio.sleep(4)

        recorder, other = RecordingHandler(takes_long), RecordingHandler()
        async with running(broker, topic, recorder, claim_min_idle_ms=1_800):
            await recorder.have(1)
            async with running(broker, topic, other, claim_min_idle_ms=1_800):
                await nothing_pending(broker, topic)
        assert (len(recorder.messages), other.messages) == (1, [])

    async def test_message_without_an_outcome_is_returned_after_max_hold(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Only max_hold_ms returns them: the claim time is an hour here. A process none of whose handlers ends is
        reported and is not ready."""
        go_on = asyncio.Event()

        async def hang(message: Message) -> None:
            await go_on.wait()

        events, hung, other = EventLog(), RecordingHandler(hang), RecordingHandler()
        patient = {"claim_min_idle_ms": 3_600_000, "max_in_flight": 2}
        await publisher.publish(topic, *numbered(2))
        async with running(events.observe(broker), topic, hung, max_hold_ms=150, **patient) as subscriber:
            await hung.have(2)
            await eventually(lambda: not subscriber.ready, what="a subscriber that is not ready")
            async with running(broker, topic, other, **patient):
                await other.have(2)
                await nothing_pending(broker, topic)
            assert len(hung.messages) == 2, "no second handler of the same process waits for the same thing"
            await eventually(lambda: "messaging.stuck" in events)
            assert sum(events.all("messaging.hold_expired", "entries")) == 2
            assert events.all("messaging.stuck", "entries") == [2]
            go_on.set()
            await eventually(lambda: subscriber.ready, what="capacity again")
            await publisher.publish(topic, Message(b"next"))
            await hung.have(3)
            await nothing_pending(broker, topic)
        assert [message.times_delivered for message in other.messages] == [2, 2]

    async def test_outcome_after_max_hold_is_accepted_unless_another_consumer_claimed_the_entry(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        events, recorder = EventLog(), RecordingHandler(wait)
        async with running(events.observe(broker), topic, recorder, max_hold_ms=150, claim_min_idle_ms=300):
            await eventually(lambda: "messaging.hold_expired" in events)
            await asyncio.sleep(0.7)  # this consumer's own reclaimer runs and does not claim it
            go_on.set()
            await nothing_pending(broker, topic)
        assert "messaging.ack_refused" not in events
        assert [message.times_delivered for message in recorder.messages] == [1]

    async def test_a_late_acknowledgement_is_refused(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        """XACK alone would acknowledge the entry although another consumer is handling it."""
        entry_id = await publish_one(publisher, topic)
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder):
            await recorder.have(1)
            await broker.xclaim(topic, "g", "another consumer", [entry_id], min_idle_ms=0)
            go_on.set()
            await eventually(lambda: recorder.running == 0)
        (pending,) = await broker.xpending_range(topic, "g")
        assert (pending.id, pending.consumer) == (entry_id, "another consumer")

    async def test_heartbeat_does_not_take_entries_back(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        entry_id = await publish_one(publisher, topic)
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder) as subscriber:
            await recorder.have(1)
            await broker.xclaim(topic, "g", "another consumer", [entry_id], min_idle_ms=0)
            touched = await broker.run(
                settle.heartbeat, topic, "g", subscriber.settings.consumer, [entry_id], times_delivered=1
            )
            assert touched.refused == [entry_id]
            (pending,) = await broker.xpending_range(topic, "g")
            assert pending.consumer == "another consumer"
            go_on.set()
            await broker.xack(topic, "g", [entry_id])

    async def test_previous_owner_stores_no_outputs(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        entry_id = await publish_one(publisher, topic)
        go_on = asyncio.Event()
        output = companion_key(topic, "out").decode()

        async def wait(message: Message) -> Message:
            await go_on.wait()
            return Message(b"stale")

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, publish_to=output):
            await recorder.have(1)
            await broker.xclaim(topic, "g", "another consumer", [entry_id], min_idle_ms=0)
            go_on.set()
            await eventually(lambda: recorder.running == 0)
        assert await broker.xlen(output) == 0
        assert (await broker.xpending(topic, "g")).consumers == {"another consumer": 1}

    async def test_retry_delayed_longer_than_claim_min_idle_is_not_claimed_early(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))
        began = await broker.server_time_ms()

        async def later(message: Message) -> None:
            if message.times_delivered == 1:
                await message.nack(delay_ms=2_500)
            else:
                times.append(await broker.server_time_ms())

        times: list[int] = []
        recorder = RecordingHandler(later)
        async with (
            running(broker, topic, recorder, claim_min_idle_ms=1_200),
            running(broker, topic, recorder, claim_min_idle_ms=1_200),
        ):
            await eventually(lambda: times)
            await nothing_pending(broker, topic)
        assert [message.times_delivered for message in recorder.messages] == [1, 2]
        assert times[0] >= began + 2_500

    async def test_delay_is_kept_after_its_consumer_has_died(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))

        async def later(message: Message) -> None:
            await message.nack(delay_ms=400)

        async with running(broker, topic, RecordingHandler(later)):

            async def delayed() -> bool:
                return bool(await broker.exists(companion_key(topic, "due:g")))

            await eventually(delayed)
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(1)
            await nothing_pending(broker, topic)
        assert recorder.messages[0].times_delivered == 2
        assert not await broker.exists(companion_key(topic, "due:g"))

    async def test_unstarted_messages_are_returned_uncounted(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """No timeout returns them: the claim time is an hour here."""
        await publisher.publish(topic, *numbered(30))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            await go_on.wait()

        first = RecordingHandler(wait)
        context = running(broker, topic, first, claim_min_idle_ms=3_600_000, ordered_by_key=lambda message: "one key")
        async with context as subscriber:
            await first.have(1)

            async def all_are_pending() -> bool:
                return (await broker.xpending(topic, "g")).count == 30

            await eventually(all_are_pending)
            closing = asyncio.create_task(subscriber.close())
            second = RecordingHandler()
            async with running(broker, topic, second, claim_min_idle_ms=3_600_000):
                await second.have(29)
                go_on.set()
                await closing
                await nothing_pending(broker, topic)
        assert first.payloads == [b"0"]
        assert {message.times_delivered for message in second.messages} == {1}

    async def test_message_interrupted_by_close_is_returned_and_counted(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))

        async def hang(message: Message) -> None:
            await asyncio.Event().wait()

        recorder = RecordingHandler(hang)
        async with running(broker, topic, recorder, claim_min_idle_ms=3_600_000, close_timeout_ms=50):
            await recorder.have(1)
        other = RecordingHandler()
        async with running(broker, topic, other, claim_min_idle_ms=3_600_000):
            await other.have(1)
            await nothing_pending(broker, topic)
        assert other.messages[0].times_delivered == 2

    async def test_closed_consumer_is_deleted_from_the_group(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(3))
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(3)
        (group,) = await broker.group_info(topic)
        assert (group.consumers, group.pending) == ([], 0)

    @pytest.mark.parametrize("still_handling", [True, False])
    @pytest.mark.parametrize("executed", [True, False])
    async def test_entry_due_while_closing_is_returned_uncounted(
        self, broker: Broker, publisher: Publisher, topic: str, still_handling: bool, executed: bool
    ) -> None:
        """The reply to the script that takes due entries is late; the server may have executed it long before."""
        await publisher.publish(topic, Message(b"long"), Message(b"again"))
        asked = HeldBack(broker, script("due_take").sha, after=executed)
        asked.let_through.set()
        go_on = asyncio.Event()

        async def handle(message: Message) -> None:
            if message.payload == b"long":
                await go_on.wait()
            elif message.times_delivered == 1:
                asked.let_through.clear()
                asked.words.clear()
                await message.nack(delay_ms=0)

        recorder = RecordingHandler(handle)
        async with running(Broker(asked.transport, Context()), topic, recorder, close_timeout_ms=600_000) as subscriber:
            await recorder.have(2)
            await eventually(lambda: asked.words, what="the question for what is due")
            if not still_handling:
                go_on.set()
                await eventually(lambda: recorder.running == 0)
            closing = asyncio.create_task(subscriber.close())
            await eventually(lambda: not subscriber.ready)
            await asyncio.sleep(0.05)
            asked.let_through.set()
            await asyncio.sleep(0.05)
            go_on.set()
            await asyncio.wait_for(closing, 60)  # and not until the close timeout
        (remaining,) = await broker.xpending_range(topic, "g")
        assert remaining.times_delivered == 1
        assert remaining.idle_ms > 60_000, "free for others at once"

    async def test_handled_message_is_acknowledged_even_if_all_tasks_are_cancelled(
        self, broker: Broker, publisher: Publisher, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As asyncio.run does at its end: the settler's task is cancelled together with the consuming task, before it
        has sent its last outcomes."""
        # On a machine that stalls for seconds, neither the last outcomes nor a read may time out: the read's entries
        # would be redelivered as isolated ones and counted by the same script that is held back here.
        monkeypatch.setattr(subscription, "CLOSE_REQUEST_S", 60.0)
        patient = {**QUICK, "grace_ms": 60_000}
        await publisher.publish(topic, *numbered(10))
        acks = HeldBack(broker, script("settle").sha, sent=False)
        recorder = RecordingHandler()
        subscriber = Subscriber(Broker(acks.transport, Context()), group="g", **patient)
        task = asyncio.create_task(subscriber.consume(topic, recorder))
        await recorder.have(10)
        await eventually(lambda: acks.words, what="acknowledgements under way")
        for item in asyncio.all_tasks():
            if item is task or topic in item.get_name():
                item.cancel()
        await asyncio.sleep(0)
        acks.let_through.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        assert (await broker.xpending(topic, "g")).count == 0

    @pytest.mark.parametrize("group", ["g", None])
    async def test_a_handler_may_close_its_subscriber(
        self, broker: Broker, publisher: Publisher, topic: str, group: str | None
    ) -> None:
        """Close does not wait for the handler that called it, and that message is acknowledged."""
        await publisher.publish(topic, *numbered(3))

        async def enough(message: Message) -> None:
            await subscriber.close()

        recorder = RecordingHandler(enough)
        options = {"max_in_flight": 1, "group_start": None if group is None else "0"}
        subscriber = Subscriber(broker, group=group, **options)  # type: ignore[arg-type]  # two kinds of values
        start = "0" if group is None else None
        await asyncio.wait_for(subscriber.consume(topic, recorder, start=start), 60)
        assert recorder.payloads == [b"0"]
        if group is not None:
            assert (await broker.xpending_range(topic, "g")) == []
