"""Reads of many topics: which topics a read names, how many entries it asks for, and which topic makes it fail."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from millstream import Broker, open_broker
from millstream.broker import Context
from millstream.broker.operations.groups import wait_for_streams
from millstream.broker.scripts.recovery import Swept
from millstream.errors import WrongKeyType
from millstream.messaging import Message
from millstream.messaging.codecs import codec
from millstream.messaging.consumer.consumer import SharedConsumer
from millstream.messaging.consumer.membership import _Group
from millstream.messaging.consumer.reads import TopicRead
from millstream.messaging.consumer.shard import GATHER_FROM, GATHER_MS
from millstream.messaging.consumer.topic import Topic
from millstream.messaging.settings import SubscriberSettings
from millstream.model import Delivery, EntryId
from support.virtual_time import run_in_virtual_time

_numbers = itertools.count(1)

Answer = Callable[[Sequence[bytes], int], list[tuple[bytes, list[Delivery]]]]


class UnusedOrigin:
    topic, group, consumer = "t", "g", "me"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("no message is settled in these tests")


class RecordingBroker:
    """A broker whose blocking reads are answered by the test. All other operations run on the wrapped broker."""

    def __init__(self, wrapped: Broker | None, answer: Answer | None = None) -> None:
        self._wrapped: Any = wrapped
        self._answer = answer
        self.context = Context() if wrapped is None else wrapped.context
        self.transport: Any = None if wrapped is None else wrapped.transport
        self.reads: list[tuple[list[bytes], int]] = []

    async def run(self, operation: Any, /, *args: Any, **options: Any) -> Any:
        if operation is not wait_for_streams:
            return await self._wrapped.run(operation, *args, **options)
        streams = args[0]
        self.reads.append((list(streams), options["count"]))
        if self._answer is None:
            return await self._wrapped.run(operation, *args, **options)
        return self._answer(streams, options["count"])


def entries(count: int, times: int | None = None) -> list[Delivery]:
    fields = {b"payload": b"x", b"uuid": b"u"}
    return [Delivery(EntryId(next(_numbers)), fields, times) for _ in range(count)]


class OneShard:
    """A consumer with one shard, whose turns the test runs itself."""

    def __init__(self, broker: Any, process_capacity: int) -> None:
        self.consumer = SharedConsumer(broker, "g", "me", lambda: None)
        self.capacity = self.consumer.capacity
        self.capacity.max_messages, self.capacity.max_bytes = process_capacity, 1 << 40
        self.capacity.entry_bytes = 1.0
        self.reader = self.consumer.reader
        self.shard = self.reader._make_shard()
        self.reader._shards.append(self.shard)
        self.topics: dict[str, Topic] = {}

    def add(self, name: str, **options: Any) -> Topic:
        settings = SubscriberSettings(group="g", consumer="me", group_start="0", **options)
        topic = Topic(self.consumer.broker, name, settings, codec("flat"), UnusedOrigin(), lambda _: None)
        topic.begin("me", self.capacity)
        topic.joined = True
        self.topics[name] = topic
        self.capacity.topics = len(self.topics)
        self.reader.add(topic)
        return topic

    @property
    def reads(self) -> list[TopicRead]:
        return list(self.shard.topics.values())

    async def turn(self) -> None:
        await self.shard._turn(self.reads)

    async def claim(self, topic: Topic, count: int) -> None:
        await self.consumer.claims.accept(topic, Swept(b"0-0", True, entries(count, 0), []), 0.0)


SPECS = st.lists(
    st.fixed_dictionaries(
        {
            "count": st.integers(1, 60),
            "max_in_flight": st.integers(1, 40),
            "received": st.integers(0, 40),
            "claimed": st.integers(0, 40),
            "backlogged": st.booleans(),
            "closing": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(specs=SPECS, process_capacity=st.integers(1, 300), turns=st.integers(1, 4), seed=st.integers(0, 1 << 32))
@hypothesis_settings(max_examples=60)
def test_read_never_asks_for_more_than_there_is_capacity_for(
    specs: Sequence[Mapping[str, Any]], process_capacity: int, turns: int, seed: int
) -> None:
    """COUNT applies to each stream, and the server here fills it for any of them: a read must not even ask for more
    than there is capacity for."""

    chance = random.Random(seed)

    async def check() -> None:
        def answer(streams: Sequence[bytes], count: int) -> list[tuple[bytes, list[Delivery]]]:
            named = [member.topics[stream.decode()] for stream in streams]
            assert count >= 1
            assert count <= min(topic.in_flight.capacity() for topic in named), "the smallest capacity of a topic"
            assert count <= min(topic.settings.count for topic in named)
            assert len(streams) * count <= process_capacity - member.capacity.messages, "the capacity of the process"
            assert not any(topic.closing for topic in named)
            assert not any(read.backlogged for read in member.reads if read.topic in named)
            return [(stream, entries(count)) for stream in streams if chance.random() < 0.5]

        member = OneShard(RecordingBroker(None, answer), process_capacity)
        for number, spec in enumerate(specs):
            topic = member.add(f"t{number}", count=spec["count"], max_in_flight=spec["max_in_flight"])
            topic.closing = spec["closing"]
        for read, spec in zip(member.reads, specs, strict=True):
            read.backlogged = spec["backlogged"]
            received = min(spec["received"], read.topic.in_flight.capacity(), member.capacity.free())
            member.reader._reads.receive(read, entries(received), 0.0)
            member.shard.received(read)
        for _ in range(turns):
            await member.turn()
            for topic, spec in zip(member.topics.values(), specs, strict=True):
                capacity = min(topic.in_flight.claim_capacity(), member.capacity.free())
                await member.claim(topic, 0 if topic.closing else min(spec["claimed"], capacity))
                assert len(topic.in_flight) <= topic.settings.max_in_flight
                released = [entry_id for entry_id in topic.in_flight.ids() if chance.random() < 0.5]
                member.consumer.settler.release(topic, released)
            assert member.capacity.messages <= process_capacity
            assert member.capacity.reserved == 0

    run_in_virtual_time(check())


def test_claimed_entries_leave_less_capacity_for_the_next_read() -> None:
    async def check() -> None:
        async with open_broker("local://") as broker:
            recording = RecordingBroker(broker, lambda streams, count: [])
            member = OneShard(recording, 1_000)
            busy, _ = (member.add(name, max_in_flight=20, count=50) for name in ("busy", "idle"))
            await member.turn()
            await member.claim(busy, 15)
            await member.turn()
            await member.claim(busy, 5)
            await member.turn()
        assert recording.reads == [([b"busy", b"idle"], 20), ([b"busy", b"idle"], 5), ([b"idle"], 20)]

    run_in_virtual_time(check())


def test_topics_that_make_a_shared_read_fail_are_located_and_the_others_lose_nothing() -> None:
    """The server refuses the whole command and names no stream: each topic is read alone, in one command pipeline."""

    async def check() -> None:
        async with open_broker("local://") as broker:
            recording = RecordingBroker(broker)
            member = OneShard(recording, 1_000)
            names = [f"t{number}" for number in range(40)]
            failures: list[BaseException] = []
            faults = {"t3": "another type", "t17": "another type", "t30": "no group"}
            for name in names:
                if faults.get(name) == "another type":
                    await broker.set(name, "no stream")
                elif name in faults:
                    await broker.xadd(name, {"payload": name, "uuid": name})
                else:
                    await broker.create_group(name, "g", start="0")
                    await broker.xadd(name, {"payload": name, "uuid": name})
                topic = member.add(name, block_ms=1_000)
                topic.failed = failures.append
                member.consumer.membership._groups[topic] = _Group()
            reading = asyncio.create_task(member.shard.run())
            good = [name for name in names if faults.get(name) != "another type"]
            while {name for name in names if member.topics[name].in_flight} != set(good):
                await asyncio.sleep(0.01)
            assert sorted(read.topic.name for read in member.reads) == sorted(good)
            assert [type(error) for error in failures] == [WrongKeyType, WrongKeyType]
            assert recording.reads[0][0] == [name.encode() for name in names]
            assert all(len(member.topics[name].in_flight) == 1 for name in good), "delivered once, and not lost"
            assert len(recording.reads) <= 4, "the streams are not tried one after another"
            reading.cancel()
            await asyncio.wait([reading])

    run_in_virtual_time(check())


def test_read_of_many_topics_that_brought_little_is_repeated_after_a_moment() -> None:
    """Each blocking read of hundreds of topics costs the server: entries that arrive within a moment share one. There
    is no pause for few topics, after many entries or none, and if the topics change."""

    async def pause_ms(topics: int, brought: int, *, another_joins: bool = False) -> float:
        def answer(streams: Sequence[bytes], count: int) -> list[tuple[bytes, list[Delivery]]]:
            return [(stream, entries(1)) for stream in streams[:brought]]

        recording = RecordingBroker(None, answer)
        member = OneShard(recording, 10_000)
        for number in range(topics):
            member.add(f"t{number}")
        if another_joins:
            asyncio.get_running_loop().call_later(0.005, member.add, "another")
        began = asyncio.get_running_loop().time()
        await member.turn()
        assert len(recording.reads) == 1
        return round((asyncio.get_running_loop().time() - began) * 1000, 3)

    async def check() -> None:
        assert await pause_ms(300, 1) == GATHER_MS
        assert await pause_ms(300, 29) == GATHER_MS
        assert await pause_ms(300, 30) == 0
        assert await pause_ms(300, 0) == 0
        assert await pause_ms(GATHER_FROM - 1, 1) == 0
        assert await pause_ms(300, 1, another_joins=True) == 5

    run_in_virtual_time(check())
