"""Handling: a message is acknowledged, retried or dead-lettered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from messaging_chapters.chapter import Chapter, RecordingHandler, nothing_pending, numbered, running
from millstream.broker.broker import Broker
from millstream.broker.keys import companion_key
from millstream.errors import InvalidArgument
from millstream.messaging import AckPolicy, AlreadySettled, Message, Publisher, Rejected, RetryLater, Subscriber
from millstream.messaging.codecs import codec
from millstream.messaging.failure import read_details
from millstream.testing.waiting import eventually


async def dead_lettered(broker: Broker, topic: str, count: int) -> list[Any]:
    dlq = companion_key(topic, "dlq")

    async def enough() -> bool:
        return await broker.xlen(dlq) >= count

    await eventually(enough, what=f"{count} dead letters")
    return await broker.xrange(dlq)


class HandlingChapter(Chapter):
    async def test_handled_message_is_acknowledged(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(50))
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(50)
            await nothing_pending(broker, topic)

        assert recorder.payloads == [b"%d" % n for n in range(50)]
        (group,) = await broker.group_info(topic)
        assert (group.lag, group.consumers) == (0, [])

    async def test_message_is_acknowledged_only_after_its_handler(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(3))
        go_on = asyncio.Event()

        async def wait(message: Message) -> None:
            if message.payload == b"1":
                await go_on.wait()

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder):
            await recorder.have(3)

            async def only_one_is_left() -> bool:
                return [entry.id for entry in await broker.xpending_range(topic, "g")] == [recorder.messages[1].id]

            await eventually(only_one_is_left)
            go_on.set()
            await nothing_pending(broker, topic)

    async def test_three_nacks_and_an_ack_are_four_receipts(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"again"))

        async def settle(message: Message) -> None:
            await (message.ack() if message.times_delivered == 4 else message.nack(delay_ms=0))

        recorder = RecordingHandler(settle)
        async with running(broker, topic, recorder):
            await recorder.have(4)
            await nothing_pending(broker, topic)

        assert [message.times_delivered for message in recorder.messages] == [1, 2, 3, 4]
        assert len({message.uuid for message in recorder.messages}) == 1

    async def test_a_delivery_is_settled_once(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"one"), Message(b"two"))
        refused: list[str] = []

        async def twice(message: Message) -> None:
            if message.times_delivered > 1:
                return
            await (message.ack() if message.payload == b"one" else message.nack(delay_ms=0))
            try:
                await message.ack()
            except AlreadySettled as error:
                refused.append(error.first)

        recorder = RecordingHandler(twice)
        async with running(broker, topic, recorder):
            await recorder.have(3)
            await nothing_pending(broker, topic)
        assert sorted(refused) == ["ack", "retry"]

    async def test_every_group_gets_its_own_copy(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"both"))

        async def fails(message: Message) -> None:
            if message.times_delivered < 3:
                raise ValueError("not yet")

        first, other = RecordingHandler(), RecordingHandler(fails)
        async with running(broker, topic, first, group="one"), running(broker, topic, other, group="other"):
            await first.have(1)
            await other.have(3)
            await nothing_pending(broker, topic, "one")
            await nothing_pending(broker, topic, "other")
        assert (len(first.messages), len(other.messages)) == (1, 3)

    async def test_two_consumers_share_the_work(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        recorder = RecordingHandler()
        async with running(broker, topic, recorder), running(broker, topic, recorder):
            await publisher.publish(topic, *numbered(200))
            await recorder.have(200)
            await nothing_pending(broker, topic)
        assert sorted(recorder.payloads, key=int) == [b"%d" % n for n in range(200)]

    async def test_failing_handler_stops_nothing_and_its_message_is_dead_lettered(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(10))

        async def fails(message: Message) -> None:
            if message.payload == b"3":
                raise ValueError("three is not for me")

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, max_deliveries=3) as subscriber:
            (letter,) = await dead_lettered(broker, topic, 1)
            await nothing_pending(broker, topic)
            assert subscriber.ready

        assert len(recorder.messages) == 12
        details = read_details(letter.fields)
        assert details is not None
        bad = [message for message in recorder.messages if message.payload == b"3"]
        assert [message.times_delivered for message in bad] == [1, 2, 3]
        assert (details.original_id, details.stream, details.group) == (str(bad[0].id), topic, "g")
        assert (details.consumer, details.deliveries) == (subscriber.settings.consumer, 3)
        assert (details.error, details.error_type) == ("three is not for me", "ValueError")
        assert "in fails" in details.traceback
        assert codec("flat").decode(letter.fields).payload == b"3"

    async def test_rejected_message_is_dead_lettered_at_once(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"raised"), Message(b"called"))

        async def reject(message: Message) -> None:
            if message.payload == b"raised":
                raise Rejected("never")
            await message.reject("never ever")

        recorder = RecordingHandler(reject)
        async with running(broker, topic, recorder):
            letters = await dead_lettered(broker, topic, 2)
        assert {letter.fields[b"dlq.error"] for letter in letters} == {b"never", b"never ever"}
        assert len(recorder.messages) == 2

    async def test_handler_may_ask_for_a_later_retry(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"later"))

        async def later(message: Message) -> None:
            if message.times_delivered == 1:
                raise RetryLater(delay_ms=150)

        recorder = RecordingHandler(later)
        began = await broker.server_time_ms()
        async with running(broker, topic, recorder):
            await recorder.have(2)
            assert await broker.server_time_ms() >= began + 150

    @pytest.mark.parametrize(
        ("policy", "receipts", "letters"),
        [("ACK_FIRST", 1, 0), ("ACK", 1, 0), ("REJECT_ON_ERROR", 1, 1), ("NACK_ON_ERROR", 3, 1)],
    )
    async def test_error_leads_to_the_outcome_of_the_ack_policy(
        self, broker: Broker, publisher: Publisher, topic: str, policy: str, receipts: int, letters: int
    ) -> None:
        await publisher.publish(topic, Message(b"x"))

        async def fails(message: Message) -> None:
            raise ValueError("no")

        recorder = RecordingHandler(fails)
        async with running(broker, topic, recorder, ack_policy=policy, max_deliveries=3):
            await recorder.have(receipts)
            await nothing_pending(broker, topic)
        assert len(recorder.messages) == receipts
        assert await broker.xlen(companion_key(topic, "dlq")) == letters

    async def test_ack_first_acknowledges_before_the_handler_starts(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, Message(b"x"))
        pending: list[int] = []

        async def look(message: Message) -> None:
            pending.append((await broker.xpending(topic, "g")).count)

        recorder = RecordingHandler(look)
        async with running(broker, topic, recorder, ack_policy=AckPolicy.ACK_FIRST):
            await eventually(lambda: pending)
        assert pending == [0]

    async def test_manual_policy_acknowledges_nothing(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(2))
        recorder = RecordingHandler()
        async with running(broker, topic, recorder, ack_policy="manual"):
            await recorder.have(2)
            await recorder.messages[1].ack()

            async def one_left() -> bool:
                return [entry.id for entry in await broker.xpending_range(topic, "g")] == [recorder.messages[0].id]

            await eventually(one_left)
            await recorder.messages[0].ack()
            await nothing_pending(broker, topic)

    async def test_entry_that_cannot_be_decoded_is_dead_lettered(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        watermill = codec("watermill")
        await broker.xadd(topic, watermill.encode(Message(b"before")))
        await broker.xadd(topic, {"metadata": b"\xc1 not msgpack", "what": b"is this"})
        await broker.xadd(topic, watermill.encode(Message(b"after")))

        recorder = RecordingHandler()
        async with running(broker, topic, recorder, codec="watermill"):
            (letter,) = await dead_lettered(broker, topic, 1)
            await recorder.have(2)
            await nothing_pending(broker, topic)
        assert recorder.payloads == [b"before", b"after"]
        assert letter.fields[b"what"] == b"is this"
        assert letter.fields[b"dlq.error_type"].endswith(b"Undecodable")

    async def test_entries_of_a_plain_xadd_do_not_stop_the_reading(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await broker.xadd(topic, {"order": "7", "amount": "12"})
        await publisher.publish(topic, Message(b"ours"))
        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await nothing_pending_after(broker, topic, 2)
        assert b"ours" in recorder.payloads

    async def test_the_output_and_the_acknowledgement_are_one_step(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(20))
        output = companion_key(topic, "out").decode()

        async def double(message: Message) -> list[Message]:
            return [Message(b"a" + message.payload), Message(b"b" + message.payload)]

        async with running(broker, topic, double, publish_to=output):
            await nothing_pending_after(broker, topic, 20)
        flat = codec("flat")
        got = [flat.decode(entry.fields).payload for entry in await broker.xrange(output)]
        assert sorted(got) == sorted(b"%b%d" % (kind, n) for n in range(20) for kind in (b"a", b"b"))

    async def test_failed_handler_publishes_no_outputs(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"x"))
        output = companion_key(topic, "out").decode()

        async def fails(message: Message) -> Message:
            if message.times_delivered < 3:
                raise ValueError("not yet")
            return Message(b"done")

        async with running(broker, topic, fails, publish_to=output):
            await nothing_pending_after(broker, topic, 1)
        assert await broker.xlen(output) == 1

    async def test_an_output_that_cannot_be_encoded_is_one_handlers_error(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        await publisher.publish(topic, *numbered(6))
        output = companion_key(topic, "out").decode()
        bad: dict[bytes, dict[str, Any]] = {
            b"1": {"number": 1},
            b"3": {"half a character": "\ud800"},
            b"5": {f"field {n}": "" for n in range(5000)},
        }

        async def put_out(message: Message) -> Message:
            return Message(message.payload, bad.get(message.payload))

        recorder = RecordingHandler(put_out)
        async with running(broker, topic, recorder, publish_to=output, max_deliveries=2):
            await nothing_pending_after(broker, topic, 6)
        flat = codec("flat")
        got = [flat.decode(entry.fields).payload for entry in await broker.xrange(output)]
        assert sorted(got) == [b"0", b"2", b"4"]
        assert sorted(recorder.payloads) == [b"0", b"1", b"1", b"2", b"3", b"3", b"4", b"5", b"5"]
        assert await broker.xlen(companion_key(topic, "dlq")) == 3

    async def test_size_of_an_entry_does_not_depend_on_its_handler(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        """Capacity is limited in bytes: if the in-flight table counted them wrongly, reading would stop."""
        await publisher.publish(topic, *(Message(b"x" * 400) for _ in range(20)))

        async def empties(message: Message) -> None:
            message.payload = b""

        recorder = RecordingHandler(empties)
        async with running(broker, topic, recorder, max_bytes_in_flight=1000):
            await recorder.have(20)

    async def test_entry_with_many_fields_can_be_dead_lettered(self, broker: Broker, topic: str) -> None:
        wide = {f"field {n}": "" for n in range(5000)}
        await broker.xadd(topic, wide)

        async def fails(message: Message) -> None:
            raise Rejected("no")

        async with running(broker, topic, fails):
            await nothing_pending_after(broker, topic, 1)
        (letter,) = await broker.xrange(companion_key(topic, "dlq"))
        assert letter.fields.keys() >= {name.encode() for name in wide}

    @pytest.mark.parametrize("shares_a_step", [True, False])
    async def test_outputs_are_stored_only_with_an_acknowledgement(
        self, broker: Broker, publisher: Publisher, topic: str, shares_a_step: bool
    ) -> None:
        """A message that is dead-lettered, after three nacks or by a rejection, produces no outputs."""
        output = f"{topic} out"
        await publisher.publish(topic, Message(b"nacked"), Message(b"rejected"), Message(b"done"))

        async def handle(message: Message) -> Message:
            if message.payload == b"nacked":
                await message.nack(delay_ms=0)
            elif message.payload == b"rejected":
                await message.reject("no")
            elif not shares_a_step:
                await message.ack()
            return Message(b"out of " + message.payload)

        recorder = RecordingHandler(handle)
        async with running(broker, topic, recorder, publish_to=output, max_deliveries=3):
            await dead_lettered(broker, topic, 2)
            await nothing_pending_after(broker, topic, 3)
        assert recorder.payloads.count(b"nacked") == 3
        entries = await broker.xrange(output)
        assert [codec("flat").decode(entry.fields).payload for entry in entries] == [b"out of done"]

    async def test_dead_letter_stream_may_be_configured(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, Message(b"x"))

        async def fails(message: Message) -> None:
            raise Rejected("no")

        async with running(broker, topic, fails, dlq=f"elsewhere {topic}"):
            await nothing_pending_after(broker, topic, 1)
        assert await broker.xlen(f"elsewhere {topic}") == 1

    async def test_max_in_flight_limits_a_topic(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *numbered(40))

        async def wait(message: Message) -> None:
            await asyncio.sleep(0.002)

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, max_in_flight=4):
            await nothing_pending_after(broker, topic, 40)
        assert recorder.max_running == 4

    async def test_max_bytes_in_flight_limits_a_topic(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        await publisher.publish(topic, *(Message(b"x" * 10_000) for _ in range(30)))

        async def wait(message: Message) -> None:
            await asyncio.sleep(0.002)

        recorder = RecordingHandler(wait)
        async with running(broker, topic, recorder, count=1, max_bytes_in_flight=25_000):
            await nothing_pending_after(broker, topic, 30)
        assert recorder.max_running <= 3

    async def test_wrong_options_are_an_error_at_the_start(self, broker: Broker) -> None:
        for wrong, named in (
            ({"group_start": None}, "group_start"),
            ({"codec": "morse"}, "codec"),
            ({"ack_policy": "maybe"}, "ack_policy"),
            ({"max_in_flight": 0}, "max_in_flight"),
            ({"group": ""}, "group"),
        ):
            with pytest.raises(InvalidArgument, match=named):
                Subscriber(broker, **{"group": "g", "group_start": "0", **wrong})  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="topic"):
            await Subscriber(broker, group="g", group_start="0").consume("", RecordingHandler())


async def nothing_pending_after(broker: Broker, topic: str, read: int) -> None:
    """Waits until all messages were delivered and settled."""

    async def done() -> bool:
        for group in await broker.group_info(topic):
            if group.name == "g":
                return group.entries_read == read and group.pending == 0
        return False

    await eventually(done, what=f"{read} entries read and settled", timeout_s=60)
