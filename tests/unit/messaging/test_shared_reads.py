"""What a shared read asks for: of whom, and how many of each; and who is to blame when it fails as a whole."""

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
from millstream.broker import Context, wait_for_streams
from millstream.broker.steps.recovery import Swept
from millstream.errors import WrongKeyType
from millstream.messaging import Message, SubscriberSettings
from millstream.messaging.codecs import codec
from millstream.messaging.subscriber.consumer import SharedConsumer
from millstream.messaging.subscriber.shard import GATHER_FROM, GATHER_MS, Shard
from millstream.messaging.subscriber.topic import Topic
from millstream.model import Delivery, EntryId
from virtual_time import run_in_virtual_time

_numbers = itertools.count(1)

Answer = Callable[[Sequence[bytes], int], list[tuple[bytes, list[Delivery]]]]


class Nowhere:
    topic, group, consumer = "t", "g", "me"

    def settle(self, message: Message, outcome: object) -> None:
        raise AssertionError("nobody settles here")


class Asked:
    """A broker whose reads that wait are answered by the test; everything else is asked of the one inside."""

    def __init__(self, inside: Broker | None, answer: Answer | None = None) -> None:
        self._inside: Any = inside
        self._answer = answer
        self.context = Context() if inside is None else inside.context
        self.link: Any = None if inside is None else inside.link
        self.reads: list[tuple[list[bytes], int]] = []

    async def run(self, step: Any, /, *args: Any, **options: Any) -> Any:
        if step is not wait_for_streams:
            return await self._inside.run(step, *args, **options)
        streams = args[0]
        self.reads.append((list(streams), options["count"]))
        if self._answer is None:
            return await self._inside.run(step, *args, **options)
        return self._answer(streams, options["count"])


def entries(count: int, times: int | None = None) -> list[Delivery]:
    fields = {b"payload": b"x", b"uuid": b"u"}
    return [Delivery(EntryId(next(_numbers)), fields, times) for _ in range(count)]


def add_topic(consumer: SharedConsumer, shard: Shard, name: str, **options: Any) -> Topic:
    settings = SubscriberSettings(group="g", consumer="me", group_start="0", **options)
    topic = Topic(consumer.broker, name, settings, codec("flat"), Nowhere(), lambda _: None)
    topic.begin("me", consumer.room)
    topic.own.active = False
    topic.joined = True
    topic.shard = shard
    consumer.topics[name] = topic
    shard.add(topic)
    return topic


SPECS = st.lists(
    st.fixed_dictionaries(
        {
            "count": st.integers(1, 60),
            "max_in_flight": st.integers(1, 40),
            "received": st.integers(0, 40),
            "taken_over": st.integers(0, 40),
            "hot": st.booleans(),
            "closing": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(specs=SPECS, process_room=st.integers(1, 300), turns=st.integers(1, 4), seed=st.integers(0, 1 << 32))
@hypothesis_settings(max_examples=60)
def test_a_read_never_asks_for_more_than_there_is_room_for(
    specs: Sequence[Mapping[str, Any]], process_room: int, turns: int, seed: int
) -> None:
    """COUNT is for each stream, and the server here fills it for whomever it likes: more than anybody
    has room for must not even be asked for."""

    chance = random.Random(seed)

    async def check() -> None:
        def answer(streams: Sequence[bytes], count: int) -> list[tuple[bytes, list[Delivery]]]:
            named = [consumer.topics[stream.decode()] for stream in streams]
            assert count >= 1
            assert count <= min(topic.book.room() for topic in named), "the least room of a topic in this read"
            assert count <= min(topic.settings.count for topic in named)
            assert len(streams) * count <= process_room - consumer.room.messages, "the process's room"
            assert not any(topic.hot or topic.closing for topic in named)
            return [(stream, entries(count)) for stream in streams if chance.random() < 0.5]

        consumer = SharedConsumer(Asked(None, answer), "g", "me", lambda: None)
        consumer.room.max_messages, consumer.room.max_bytes, consumer.room.entry_bytes = process_room, 1 << 40, 1.0
        shard = Shard(consumer.reader, None, polls=False)
        for number, spec in enumerate(specs):
            topic = add_topic(consumer, shard, f"t{number}", count=spec["count"], max_in_flight=spec["max_in_flight"])
            topic.hot, topic.closing = spec["hot"], spec["closing"]
        topics = list(shard.topics.values())
        for topic, spec in zip(topics, specs, strict=True):
            received = min(spec["received"], topic.book.room(), consumer.room.free())
            shard._received(topic, entries(received), 0.0)
        for _ in range(turns):
            await shard._turn(topics)
            for topic, spec in zip(topics, specs, strict=True):
                taken = 0 if topic.closing else min(spec["taken_over"], topic.sweep_room(), consumer.room.free())
                await consumer.sweeper._take(topic, Swept(b"0-0", True, entries(taken, 0), []), 0.0)
                assert len(topic.book.entries) <= topic.settings.max_in_flight
                consumer.release(topic, [one for one in topic.book.entries if chance.random() < 0.5])
            assert consumer.room.messages <= process_room
            assert consumer.room.reserved == 0

    run_in_virtual_time(check())


def test_what_a_sweep_took_over_leaves_less_room_for_the_next_read() -> None:
    async def check() -> None:
        async with open_broker("local://") as broker:
            asked = Asked(broker, lambda streams, count: [])
            consumer = SharedConsumer(asked, "g", "me", lambda: None)
            consumer.room.max_messages, consumer.room.max_bytes, consumer.room.entry_bytes = 1_000, 1 << 40, 1.0
            shard = Shard(consumer.reader, None, polls=False)
            busy, quiet = (add_topic(consumer, shard, name, max_in_flight=20, count=50) for name in ("busy", "quiet"))
            await shard._turn([busy, quiet])
            await consumer.sweeper._take(busy, Swept(b"0-0", True, entries(15, 0), []), 0.0)
            await shard._turn([busy, quiet])
            await consumer.sweeper._take(busy, Swept(b"0-0", True, entries(5, 0), []), 0.0)
            await shard._turn([busy, quiet])
        assert asked.reads == [([b"busy", b"quiet"], 20), ([b"busy", b"quiet"], 5), ([b"quiet"], 20)]

    run_in_virtual_time(check())


def test_each_culprit_of_a_read_that_fails_as_a_whole_is_found_and_the_others_lose_nothing() -> None:
    """The server refuses the whole command, and names nobody: each topic is asked alone, by one pipeline."""

    async def check() -> None:
        async with open_broker("local://") as broker:
            asked = Asked(broker)
            consumer = SharedConsumer(asked, "g", "me", lambda: None)
            consumer.room.max_messages, consumer.room.max_bytes, consumer.room.entry_bytes = 1_000, 1 << 40, 1.0
            shard = Shard(consumer.reader, None, polls=False)
            names = [f"t{number}" for number in range(40)]
            failures: list[BaseException] = []
            culprits = {"t3": "another type", "t17": "another type", "t30": "no group"}
            for name in names:
                if culprits.get(name) == "another type":
                    await broker.set(name, "no stream")
                elif name in culprits:
                    await broker.xadd(name, {"payload": name, "uuid": name})
                else:
                    await broker.create_group(name, "g", start="0")
                    await broker.xadd(name, {"payload": name, "uuid": name})
                add_topic(consumer, shard, name, block_ms=1_000).failed = failures.append
            reading = asyncio.create_task(shard.run())
            good = [name for name in names if culprits.get(name) != "another type"]
            while {name for name in names if consumer.topics[name].book.entries} != set(good):
                await asyncio.sleep(0.01)
            assert sorted(topic.name for topic in shard.topics.values()) == sorted(good)
            assert [type(error) for error in failures] == [WrongKeyType, WrongKeyType]
            assert asked.reads[0][0] == [name.encode() for name in names]
            assert all(len(consumer.topics[name].book.entries) == 1 for name in good), "brought once, and not lost"
            assert len(asked.reads) <= 4, "no search through the streams one by one"
            reading.cancel()
            await asyncio.wait([reading])

    run_in_virtual_time(check())


def test_a_read_of_many_topics_that_brought_little_is_asked_again_a_moment_later() -> None:
    """Each wait for hundreds of topics has its price on the server: what comes within a moment shall cost one. Where
    few are waited for, where much came or nothing, and where the topics change, nobody waits."""

    async def pause_ms(topics: int, brought: int, *, another_joins: bool = False) -> float:
        def answer(streams: Sequence[bytes], count: int) -> list[tuple[bytes, list[Delivery]]]:
            return [(stream, entries(1)) for stream in streams[:brought]]

        consumer = SharedConsumer(Asked(None, answer), "g", "me", lambda: None)
        consumer.room.max_messages, consumer.room.max_bytes, consumer.room.entry_bytes = 10_000, 1 << 40, 1.0
        shard = Shard(consumer.reader, None, polls=False)
        for number in range(topics):
            add_topic(consumer, shard, f"t{number}")
        if another_joins:
            asyncio.get_running_loop().call_later(0.005, add_topic, consumer, shard, "another")
        began = asyncio.get_running_loop().time()
        await shard._turn(list(shard.topics.values()))
        assert len(consumer.broker.reads) == 1  # type: ignore[attr-defined]  # Asked has them
        return round((asyncio.get_running_loop().time() - began) * 1000, 3)

    async def check() -> None:
        assert await pause_ms(300, 1) == GATHER_MS
        assert await pause_ms(300, 29) == GATHER_MS
        assert await pause_ms(300, 30) == 0
        assert await pause_ms(300, 0) == 0
        assert await pause_ms(GATHER_FROM - 1, 1) == 0
        assert await pause_ms(300, 1, another_joins=True) == 5

    run_in_virtual_time(check())
