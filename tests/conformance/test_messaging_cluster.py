"""Messaging on a real Cluster: companion keys share the stream's slot; outputs in other slots are written first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from messaging_chapters.chapter import RecordingHandler, nothing_pending, numbered, running
from messaging_chapters.handling import nothing_pending_after
from messaging_chapters.recovery import abandon

from millstream import Broker, open_broker
from millstream.broker.keys import companion_key, slot_of
from millstream.messaging import Message, Publisher, Rejected
from millstream.messaging.codecs import codec
from millstream.testing import ClusterSetup


@pytest.fixture
async def broker(cluster: ClusterSetup) -> AsyncIterator[Broker]:
    async with open_broker(cluster.url) as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    return f"jobs:{uuid4().hex[:8]}"


@pytest.fixture
async def publisher(broker: Broker) -> AsyncIterator[Publisher]:
    async with Publisher(broker) as opened:
        yield opened


def elsewhere(topic: str) -> str:
    """A stream in another slot."""
    return next(name for n in range(100) if slot_of((name := f"{topic}.{n}").encode()) != slot_of(topic.encode()))


async def payloads(broker: Broker, stream: str | bytes) -> list[bytes]:
    return [codec("flat").decode(entry.fields).payload for entry in await broker.xrange(stream)]


async def test_retries_delays_and_dead_letters(broker: Broker, publisher: Publisher, topic: str) -> None:
    await publisher.publish(topic, *numbered(20))
    await publisher.publish(topic, Message(b"later"), delay_ms=100)

    async def fails(message: Message) -> None:
        if message.payload == b"7":
            raise Rejected("seven")
        if message.payload == b"3" and message.times_delivered < 3:
            await message.nack(delay_ms=20)

    recorder = RecordingHandler(fails)
    async with running(broker, topic, recorder):
        await recorder.have(23)
        await nothing_pending(broker, topic)
    assert b"later" in recorder.payloads
    assert await broker.xlen(companion_key(topic, "dlq")) == 1


async def test_entries_of_a_dead_consumer(broker: Broker, publisher: Publisher, topic: str) -> None:
    await publisher.publish(topic, *numbered(10))
    await abandon(broker, topic, "dead", count=10)
    recorder = RecordingHandler()
    async with running(broker, topic, recorder):
        await recorder.have(10)
        await nothing_pending(broker, topic)


@pytest.mark.parametrize("near", [True, False])
async def test_outputs_and_dead_letters_in_the_same_and_in_other_slots(
    broker: Broker, publisher: Publisher, topic: str, near: bool
) -> None:
    await publisher.publish(topic, *numbered(10))
    output = companion_key(topic, "out").decode() if near else elsewhere(topic)
    dlq = companion_key(topic, "graves").decode() if near else elsewhere(topic + ".dlq")

    async def handle(message: Message) -> Message:
        if message.payload == b"4":
            raise Rejected("four")
        return Message(b"out " + message.payload)

    async with running(broker, topic, handle, publish_to=output, dlq=dlq):
        await nothing_pending_after(broker, topic, 10)
    assert sorted(await payloads(broker, output)) == sorted(b"out %d" % n for n in range(10) if n != 4)
    assert await broker.xlen(dlq) == 1


async def test_idempotent_publishing(broker: Broker, topic: str) -> None:
    async with Publisher(broker) as first, Publisher(broker) as other:
        await first.publish(topic, Message(b"x"), idempotency_key="k")
        assert await other.publish(topic, Message(b"x"), idempotency_key="k") == [None]
        await first.publish(topic, *numbered(5))
    assert await broker.xlen(topic) == 6
