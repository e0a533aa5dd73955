"""Publishing: in order, in batches, once each."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from messaging_chapters.chapter import Chapter, RecordingHandler, numbered, running
from millstream.broker.broker import Broker
from millstream.broker.context import Limits
from millstream.broker.keys import companion_key
from millstream.errors import BrokerUnavailable, DurabilityUnavailable, InvalidArgument, PayloadTooLarge
from millstream.messaging import Message, Publisher
from millstream.messaging.codecs import codec
from millstream.messaging.errors import PublisherClosed
from millstream.model.policies import replicated
from millstream.testing.faults import Fault, FaultyTransport
from millstream.testing.waiting import eventually
from millstream.wire.commands import Batch, Command


async def stored(broker: Broker, topic: str) -> list[bytes]:
    flat = codec("flat")
    return [flat.decode(entry.fields).payload for entry in await broker.xrange(topic)]


def faulty(broker: Broker, faults: Any) -> Broker:
    """The same broker over a transport with the given faults."""
    return Broker(FaultyTransport(broker.transport, faults), broker.context)


def writes(request: Command | Batch) -> bool:
    return isinstance(request, Command) and request.args[0] == b"EVALSHA"


def first_write_waits(broker: Broker) -> tuple[Broker, asyncio.Event]:
    """The same broker over a transport whose first write waits for the event; later writes do not."""
    transport = FaultyTransport(broker.transport)
    call = transport.call
    release = asyncio.Event()
    writing = False

    async def held_back(command: Command) -> Any:
        nonlocal writing
        if writes(command) and not writing:
            writing = True
            await release.wait()
        return await call(command)

    transport.call = held_back  # type: ignore[method-assign]
    return Broker(transport, broker.context), release


class PublishingChapter(Chapter):
    async def test_a_message_arrives_as_it_was_sent(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        sent = Message(b"\x00zero\x00\xff bytes\r\n", {"key": "k", "Grüße": "ja"})
        (entry_id,) = await publisher.publish(topic, sent)

        recorder = RecordingHandler()
        async with running(broker, topic, recorder) as subscriber:
            await recorder.have(1)
            (got,) = recorder.messages
            assert (got.payload, got.metadata, got.uuid) == (sent.payload, sent.metadata, sent.uuid)
            assert (got.id, got.topic, got.group, got.key) == (entry_id, topic, "g", "k")
            assert got.consumer == subscriber.settings.consumer
            assert got.times_delivered == 1

    async def test_twenty_messages_stay_in_order(self, broker: Broker, publisher: Publisher, topic: str) -> None:
        for message in numbered(20):
            await publisher.publish(topic, message)

        assert await stored(broker, topic) == [b"%d" % n for n in range(20)]

    async def test_concurrent_publishes_keep_the_order_of_the_calls(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        ids = await asyncio.gather(*(publisher.publish(topic, message) for message in numbered(500)))

        assert await stored(broker, topic) == [b"%d" % n for n in range(500)]
        assert [entry.id for entry in await broker.xrange(topic)] == [entry_id for (entry_id,) in ids]

    @pytest.mark.parametrize("max_buffered", [1, 10_000], ids=["waiting for capacity", "queued"])
    async def test_every_kind_of_publish_keeps_the_order_of_the_calls(
        self, broker: Broker, topic: str, max_buffered: int
    ) -> None:
        kinds: list[dict[str, Any]] = [{}, {"idempotency_key": "a"}, {"durability": "memory"}, {}]
        kinds += [{"idempotency_key": "b", "durability": "memory"}, {"idempotency_key": "c"}, {"idempotency_key": "c"}]
        slow, release = first_write_waits(broker)
        async with Publisher(slow, max_buffered=max_buffered) as publisher:
            calls = [
                asyncio.ensure_future(publisher.publish(topic, message, **kind))
                for message, kind in zip(numbered(len(kinds)), kinds, strict=True)
            ]
            await asyncio.wait(calls, timeout=0.05)  # time to overtake the first write
            release.set()
            ids = await asyncio.gather(*calls)

        assert ids[-1] == [None]  # the second call with this key
        assert await stored(broker, topic) == [b"%d" % at for at in range(len(kinds) - 1)]

    async def test_a_delayed_publish_does_not_overtake_an_earlier_one(self, broker: Broker, topic: str) -> None:
        slow, release = first_write_waits(broker)
        async with Publisher(slow) as publisher:
            calls = [asyncio.ensure_future(publisher.publish(topic, Message(b"first")))]
            calls += [asyncio.ensure_future(publisher.publish(topic, each, delay_ms=0)) for each in numbered(12)]
            await asyncio.wait(calls, timeout=0.05)
            release.set()
            await asyncio.gather(*calls)

            async def all_there() -> bool:
                return await broker.xlen(topic) == 13

            await eventually(all_there)
        assert await stored(broker, topic) == [b"first", *(b"%d" % at for at in range(12))]

    async def test_concurrent_keyed_publishes_share_a_batch(self, broker: Broker, topic: str) -> None:
        transport = FaultyTransport(broker.transport)
        async with Publisher(Broker(transport, broker.context)) as publisher:
            calls = [publisher.publish(topic, each, idempotency_key=str(at)) for at, each in enumerate(numbered(100))]
            await asyncio.gather(*calls)

        assert len([request for request in transport.plan.requests if writes(request)]) <= 10
        assert await stored(broker, topic) == [b"%d" % at for at in range(100)]

    async def test_keyed_publishes_to_partitions_keep_the_order_of_the_calls(self, broker: Broker, topic: str) -> None:
        slow, release = first_write_waits(broker)
        keyed = [Message(b"%d" % at, {"key": f"k{at}"}) for at in range(20)]
        async with Publisher(slow, partitions={topic: 3}) as publisher:
            first = asyncio.ensure_future(publisher.publish(topic, *keyed, idempotency_key="first"))
            after = [Message(b"after", {"key": f"k{at}"}) for at in range(20)]
            second = asyncio.ensure_future(publisher.publish(topic, *after))
            await asyncio.wait([first, second], timeout=0.05)
            release.set()
            await asyncio.gather(first, second)

        for number in range(3):
            payloads = await stored(broker, f"{topic}.p{number}")
            assert payloads.index(b"after") == len(payloads) // 2

    async def test_five_publishers_lose_nothing(self, broker: Broker, topic: str) -> None:
        async def publish(name: int) -> None:
            async with Publisher(broker) as publisher:
                await asyncio.gather(*(publisher.publish(topic, Message(b"%d.%d" % (name, n))) for n in range(50)))

        await asyncio.gather(*map(publish, range(5)))

        got = await stored(broker, topic)
        for name in range(5):
            own = [payload for payload in got if payload.startswith(b"%d." % name)]
            assert own == [b"%d.%d" % (name, n) for n in range(50)]

    async def test_one_call_may_publish_more_than_a_batch(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker, max_batch=7) as publisher:
            ids = await publisher.publish(topic, *numbered(30))

        assert ids == [entry.id for entry in await broker.xrange(topic)]
        assert await stored(broker, topic) == [b"%d" % n for n in range(30)]

    async def test_concurrent_publishes_share_a_batch(self, broker: Broker, topic: str) -> None:
        transport = FaultyTransport(broker.transport)
        async with Publisher(Broker(transport, broker.context)) as publisher:
            await asyncio.gather(*(publisher.publish(topic, message) for message in numbered(100)))

        assert len([request for request in transport.plan.requests if writes(request)]) <= 10

    @pytest.mark.parametrize("fault", [Fault.refused(), Fault.answer_lost()])
    async def test_a_retry_adds_nothing(self, broker: Broker, topic: str, fault: Fault) -> None:
        failed: list[int] = []

        def every_third(request: Command | Batch) -> Fault | None:
            if writes(request):
                failed.append(len(failed))
                return fault if len(failed) % 3 == 2 else None
            return None

        async with Publisher(faulty(broker, every_third)) as publisher:
            ids = [await publisher.publish(topic, *numbered(3, at)) for at in range(0, 30, 3)]

        assert await stored(broker, topic) == [b"%d" % n for n in range(30)]
        assert [item for batch in ids for item in batch] == [entry.id for entry in await broker.xrange(topic)]

    @pytest.mark.parametrize("fault", [Fault.refused(), Fault.answer_lost()])
    @pytest.mark.parametrize("way", [{"idempotency_key": "k"}, {"delay_ms": 0}], ids=["unique", "delayed"])
    async def test_every_kind_of_publish_is_retried(
        self, broker: Broker, topic: str, way: dict[str, Any], fault: Fault
    ) -> None:
        """The transport's deadline has passed by then: the publisher retries, for ``retry_ms``."""
        failures = iter((fault, fault))

        def twice(request: Command | Batch) -> Fault | None:
            return next(failures, None) if writes(request) else None

        async with Publisher(faulty(broker, twice)) as publisher:
            await publisher.publish(topic, *numbered(3), **way)
            assert publisher.ready

            async def there() -> bool:
                return await broker.xlen(topic) >= 3

            await eventually(there)
        assert await stored(broker, topic) == [b"0", b"1", b"2"]

    @pytest.mark.parametrize("way", [{"idempotency_key": "k"}, {"delay_ms": 0}], ids=["unique", "delayed"])
    async def test_every_kind_of_publish_raises_when_its_deadline_passes(
        self, broker: Broker, topic: str, way: dict[str, Any]
    ) -> None:
        asked: list[Command | Batch] = []

        def always(request: Command | Batch) -> Fault | None:
            if not writes(request):
                return None
            asked.append(request)
            return Fault.refused()

        publisher = Publisher(faulty(broker, always), retry_ms=1)
        with pytest.raises(BrokerUnavailable):
            await publisher.publish(topic, Message(b""), **way)
        assert len(asked) > 1
        await publisher.close()

    async def test_a_key_is_not_forgotten_while_its_publish_is_repeated(self, broker: Broker) -> None:
        with pytest.raises(InvalidArgument, match="at least retry_ms, 30000"):
            Publisher(broker, idempotency_window_ms=29_999)
        await Publisher(broker, idempotency_window_ms=5_000, retry_ms=5_000).close()

    async def test_close_waits_for_retries(self, broker: Broker, topic: str) -> None:
        away = True

        def choose(request: Command | Batch) -> Fault | None:
            return Fault.refused() if writes(request) and away else None

        publisher = Publisher(faulty(broker, choose), retry_ms=600_000)
        calls = [
            asyncio.ensure_future(publisher.publish(topic, Message(b"unique"), idempotency_key="k")),
            asyncio.ensure_future(publisher.publish(topic, Message(b"delayed"), delay_ms=3_600_000)),
        ]
        await eventually(lambda: not publisher.ready, what="both are tried again")
        closing = asyncio.ensure_future(publisher.close())
        await asyncio.wait([closing], timeout=0.05)
        assert not closing.done()
        away = False
        await closing
        assert all(call.done() for call in calls)
        await asyncio.gather(*calls)
        assert "millstream delayed publisher" not in {task.get_name() for task in asyncio.all_tasks()}

    async def test_messages_after_a_failed_batch_are_stored_as_new_ones(self, broker: Broker, topic: str) -> None:
        answers_are_lost = True

        def choose(request: Command | Batch) -> Fault | None:
            return Fault.answer_lost() if writes(request) and answers_are_lost else None

        publisher = Publisher(faulty(broker, choose), retry_ms=1)
        with pytest.raises(BrokerUnavailable):
            await publisher.publish(topic, Message(b"perhaps"))
        answers_are_lost = False
        await publisher.publish(topic, Message(b"certainly"))
        await publisher.close()

        assert await stored(broker, topic) == [b"perhaps", b"certainly"]

    async def test_idempotency_key_covers_all_publishers(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker) as publisher, Publisher(broker) as other:
            (first,) = await publisher.publish(topic, Message(b"pay"), idempotency_key="order 7")
            assert await other.publish(topic, Message(b"pay"), idempotency_key="order 7") == [None]
            (third,) = await other.publish(topic, Message(b"pay"), idempotency_key="order 8")

        assert [entry.id for entry in await broker.xrange(topic)] == [first, third]

    async def test_idempotency_keys_of_calls_with_several_messages_do_not_collide(
        self, broker: Broker, topic: str
    ) -> None:
        async with Publisher(broker) as publisher:
            await publisher.publish(topic, Message(b"a"), Message(b"b"), idempotency_key="order")
            assert await publisher.publish(topic, Message(b"c"), idempotency_key="order#1") != [None]

        assert await stored(broker, topic) == [b"a", b"b", b"c"]

    async def test_a_delayed_message_is_as_durable_as_asked(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker) as publisher:
            with pytest.raises(DurabilityUnavailable):
                await publisher.publish(topic, Message(b"later"), delay_ms=0, durability=replicated(7, timeout_ms=1))

    async def test_two_durabilities_that_differ_in_time_alone_count_their_own_rows(
        self, broker: Broker, topic: str
    ) -> None:
        async with Publisher(broker, retry_ms=1) as publisher:
            for timeout_ms in (1, 2):
                with pytest.raises(DurabilityUnavailable):
                    await publisher.publish(topic, Message(b""), durability=replicated(7, timeout_ms=timeout_ms))

        assert await broker.xlen(topic) in (0, 2)  # 0 if it is known before that there are no replicas

    async def test_a_delayed_message_with_too_many_fields_is_refused_at_once(self, broker: Broker, topic: str) -> None:
        wide = Message(b"wide", {f"field {n}": "" for n in range(4000)})
        async with Publisher(broker) as publisher:
            with pytest.raises(InvalidArgument):
                await publisher.publish(topic, wide, delay_ms=0)
            await publisher.publish(topic, Message(b"narrow"), delay_ms=0)

            async def there() -> bool:
                return await broker.xlen(topic) == 1

            await eventually(there)

    async def test_delayed_message_is_delivered_when_it_is_due(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        began = await broker.server_time_ms()
        await publisher.publish(topic, Message(b"later"), delay_ms=1_500)
        await publisher.publish(topic, Message(b"now"))

        async def both() -> bool:
            return await broker.xlen(topic) == 2

        await eventually(both)
        assert await stored(broker, topic) == [b"now", b"later"]
        assert (await broker.xrange(topic))[1].id.ms >= began + 1_500

    async def test_subscriber_publishes_delayed_messages_of_a_closed_publisher(
        self, broker: Broker, topic: str
    ) -> None:
        async with Publisher(broker) as publisher:
            await publisher.publish(topic, *numbered(3), delay_ms=200)

        recorder = RecordingHandler()
        async with running(broker, topic, recorder):
            await recorder.have(3)
        assert recorder.payloads == [b"0", b"1", b"2"]

    async def test_delaying_again_adds_nothing(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker) as publisher:
            await publisher.publish(topic, Message(b"once"), delay_ms=0, idempotency_key="k")

            async def there() -> bool:
                return await broker.xlen(topic) == 1

            await eventually(there)
            await publisher.publish(topic, Message(b"once"), delay_ms=0, idempotency_key="k")
            await publisher.publish(topic, Message(b"after"), delay_ms=0)

            async def two() -> bool:
                return await broker.xlen(topic) == 2

            await eventually(two)
        assert await stored(broker, topic) == [b"once", b"after"]

    async def test_idempotency_key_covers_delayed_messages(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker) as first, Publisher(broker) as other:
            for publisher in (first, other, first, other, first):  # each message has a uuid of its own
                await publisher.publish(topic, Message(b"pay"), delay_ms=0, idempotency_key="order 7")
            await first.publish(topic, Message(b"after"), delay_ms=1)

            async def last_is_there() -> bool:
                return b"after" in await stored(broker, topic)

            await eventually(last_is_there)
        assert await stored(broker, topic) == [b"pay", b"after"]

    async def test_idempotency_key_covers_immediate_and_delayed_messages(self, broker: Broker, topic: str) -> None:
        async with Publisher(broker) as publisher:
            await publisher.publish(topic, Message(b"a"), idempotency_key="now first")
            await publisher.publish(topic, Message(b"b"), delay_ms=0, idempotency_key="now first")
            await publisher.publish(topic, Message(b"c"), delay_ms=3_600_000, idempotency_key="later first")
            assert await publisher.publish(topic, Message(b"d"), idempotency_key="later first") == [None]
            await publisher.publish(topic, Message(b"after"), delay_ms=1)

            async def last_is_there() -> bool:
                return b"after" in await stored(broker, topic)

            await eventually(last_is_there)
        assert await stored(broker, topic) == [b"a", b"after"]

    async def test_a_key_is_remembered_for_a_day_after_its_message_was_due(self, broker: Broker, topic: str) -> None:
        hour, day = 3_600_000, 24 * 3_600_000
        async with Publisher(broker) as publisher:
            await publisher.publish(topic, Message(b"later"), delay_ms=hour, idempotency_key="k")

        for suffix in ("seen.a", "seen.t"):
            remaining = await broker.ttl_ms(companion_key(topic, suffix))
            assert remaining is not None
            assert remaining > day + hour

    async def test_publish_waits_when_too_much_is_buffered(self, broker: Broker, topic: str) -> None:
        release = asyncio.Event()
        transport = FaultyTransport(broker.transport)
        call = transport.call

        async def held_back(command: Command) -> Any:
            await release.wait()
            return await call(command)

        transport.call = held_back  # type: ignore[method-assign]
        publisher = Publisher(Broker(transport, broker.context), max_buffered=10, max_batch=5)
        tasks = [asyncio.create_task(publisher.publish(topic, message)) for message in numbered(40)]
        await asyncio.wait(tasks, timeout=0.05)
        assert publisher.buffered <= 10

        release.set()
        await asyncio.gather(*tasks)
        await publisher.close()
        assert await stored(broker, topic) == [b"%d" % n for n in range(40)]

    async def test_close_sends_buffered_messages_and_accepts_no_more(self, broker: Broker, topic: str) -> None:
        publisher = Publisher(broker)
        tasks = [asyncio.create_task(publisher.publish(topic, message)) for message in numbered(50)]
        await asyncio.sleep(0)
        await publisher.close()
        await asyncio.gather(*tasks)
        await publisher.close()

        assert await broker.xlen(topic) == 50
        with pytest.raises(PublisherClosed):
            await publisher.publish(topic, Message(b"late"))

    async def test_cancelled_publish_does_not_affect_other_calls(
        self, broker: Broker, publisher: Publisher, topic: str
    ) -> None:
        tasks = [asyncio.create_task(publisher.publish(topic, message)) for message in numbered(10)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(item) for at, item in enumerate(done) if at != 4] == [list] * 9
        got = await stored(broker, topic)
        assert [payload for payload in got if payload != b"4"] == [b"%d" % n for n in range(10) if n != 4]

    async def test_a_publisher_whose_loop_ends_can_be_closed(self, broker: Broker, topic: str) -> None:
        """asyncio.run cancels all tasks at its end, also the publisher's. Close must not wait for messages without a
        sender."""
        transport = FaultyTransport(broker.transport)
        call = transport.call

        async def never(command: Command) -> Any:
            await asyncio.Event().wait()

        transport.call = never  # type: ignore[method-assign]  # this is what the broker calls
        publisher = Publisher(Broker(transport, broker.context), max_buffered=5, max_batch=2)
        tasks = [asyncio.create_task(publisher.publish(topic, message)) for message in numbered(5)]
        tasks += [asyncio.create_task(publisher.publish(topic, *numbered(6)))]
        await eventually(lambda: publisher.buffered == 5 and publisher.waiting == 1)
        for task in asyncio.all_tasks():
            if task in tasks or topic in task.get_name():
                task.cancel()
        await asyncio.wait(tasks)
        assert publisher.buffered == 0
        transport.call = call  # type: ignore[method-assign]
        await publisher.publish(topic, Message(b"in the next loop"))
        await asyncio.wait_for(publisher.close(), 60)
        assert (await stored(broker, topic))[-1] == b"in the next loop"

    async def test_a_loop_that_ends_before_the_first_step_of_sending(self, broker: Broker, topic: str) -> None:
        publisher = Publisher(broker)
        publishing = asyncio.create_task(publisher.publish(topic, Message(b"never sent")))
        await asyncio.sleep(0)  # the sending task was created and has not started
        [sending] = [task for task in asyncio.all_tasks() if topic in task.get_name()]
        sending.cancel()
        publishing.cancel()
        await asyncio.wait([publishing, sending])
        assert publisher.buffered == 0
        await asyncio.wait_for(publisher.publish(topic, Message(b"in the next loop")), 60)
        await asyncio.wait_for(publisher.close(), 60)
        assert await stored(broker, topic) == [b"in the next loop"]

    async def test_a_message_that_is_too_large_is_its_own_error(self, broker: Broker, topic: str) -> None:
        small = Broker(broker.transport, type(broker.context)(limits=Limits(max_entry_bytes=1000)))
        async with Publisher(small) as publisher:
            good, bad = await asyncio.gather(
                publisher.publish(topic, Message(b"small")),
                publisher.publish(topic, Message(b"x" * 2000)),
                return_exceptions=True,
            )

        assert isinstance(bad, PayloadTooLarge)
        assert isinstance(good, list)
        assert await stored(broker, topic) == [b"small"]

    async def test_a_topic_needs_a_name(self, publisher: Publisher) -> None:
        with pytest.raises(InvalidArgument, match="topic"):
            await publisher.publish("", Message(b"x"))

    async def test_an_unknown_codec_is_an_error_at_once(self, broker: Broker) -> None:
        with pytest.raises(InvalidArgument, match="flat"):
            Publisher(broker, codec=uuid4().hex)
