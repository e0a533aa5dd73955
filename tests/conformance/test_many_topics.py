"""Hundreds of topics in one process share readers, and do not affect each other.

With ``TRIALS=20`` a thousand of them, also on a Cluster of three.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from messaging_chapters.chapter import QUICK, EventLog, RecordingHandler, flush, numbered
from messaging_chapters.recovery import abandon

from millstream import Broker, open_broker
from millstream.broker import companion_key
from millstream.errors import PermissionDenied, WrongKeyType
from millstream.messaging import Message, Publisher, RetryLater, Subscriber
from millstream.messaging.consumer import backlog, reads
from millstream.messaging.consumer import consumer as shared
from millstream.messaging.consumer.reader import SHARD_SIZE
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.wire.commands import Command

IN_FULL = int(os.environ.get("TRIALS", "2")) > 2
MANY = SHARD_SIZE * 5 // 2
"""A thousand: more than two readers can take."""
SOME = MANY if IN_FULL else 300
WHERE = ("embedded", "server", "redis", *(["cluster"] if IN_FULL else []))
CALM: dict[str, Any] = {**QUICK, "block_ms": 2_000, "claim_interval_ms": 1_000}


@pytest.fixture(params=WHERE)
async def broker(request: pytest.FixtureRequest, url_in: Callable[[str], str]) -> AsyncIterator[Broker]:
    url = url_in(request.param)
    async with open_broker(url) as opened:
        await flush(url)
        yield opened


@asynccontextmanager
async def reading(
    broker: Broker, topics: list[str], handler: Any, **options: Any
) -> AsyncIterator[tuple[Subscriber, dict[str, asyncio.Task[None]]]]:
    """A subscriber on all of them, until the end of the block."""
    subscriber = Subscriber(broker, **{"group": "g", "consumer": "me", **CALM, **options})
    tasks = {topic: asyncio.create_task(subscriber.consume(topic, handler)) for topic in topics}
    try:
        await eventually(
            lambda: (
                len(subscriber.readiness) == len([1 for task in tasks.values() if not task.done()]) and subscriber.ready
            ),
            what="all to be read",
            timeout_s=120,
        )
        yield subscriber, tasks
    finally:
        await subscriber.close()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def acknowledged(broker: Broker, topics: list[str]) -> None:
    async def none_left() -> bool:
        return all([(await broker.xpending(topic, "g")).count == 0 for topic in topics])

    await eventually(none_left, what="empty pending lists", timeout_s=120)


async def connections(broker: Broker) -> int:
    reply: bytes = await broker.transport.call(Command((b"CLIENT", b"LIST", b"TYPE", b"NORMAL")))
    return reply.count(b"\n")


async def test_every_topic_is_read_by_few_connections_and_tasks(broker: Broker) -> None:
    topics = [f"t{n}" for n in range(MANY)]
    before = len(asyncio.all_tasks())
    async with Publisher(broker) as publisher:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder):
            # One task for each ``consume`` of this test, and the shared ones.
            assert len(asyncio.all_tasks()) - before - MANY < 30
            if not broker.transport.features.embedded:
                assert await connections(broker) < 32
            for topic in topics:
                await publisher.publish(topic, Message(topic.encode()))
            await recorder.have(MANY, timeout_s=120)
            await acknowledged(broker, topics[:50])
    assert Counter(recorder.payloads) == Counter(topic.encode() for topic in topics)


async def test_backlogged_stream_does_not_starve_idle_ones(broker: Broker) -> None:
    """The backlogged topic gets messages until each idle one was read: if it had priority, they never would be."""
    topics = ["hot", *(f"quiet-{n}" for n in range(MANY - 1))]
    waits: dict[str, float] = {}
    hot_left_when_heard: list[int] = []
    overtaken_by: dict[str, int] = {}
    handled_before: dict[str, int] = {}
    handled = Counter[str]()
    published = 0
    heard_all = asyncio.Event()
    fed = asyncio.Event()

    async def feed() -> None:
        nonlocal published
        while not heard_all.is_set():
            if published - handled["hot"] < 1_000:
                published += len(await publisher.publish("hot", *numbered(500, published)))
            fed.set()
            await asyncio.sleep(0.001)

    async def handle(message: Message) -> None:
        assert message.topic is not None
        if message.topic != "hot":
            hot_left_when_heard.append(published - handled["hot"])
            waits[message.topic] = time.monotonic() - float(message.payload)
            overtaken_by[message.topic] = handled["hot"] - handled_before[message.topic]
        else:
            while published - handled["hot"] <= 200 and not heard_all.is_set():
                fed.clear()
                await fed.wait()
        handled[message.topic] += 1

    async with Publisher(broker) as publisher:
        feeding = asyncio.create_task(feed())
        await fed.wait()
        async with reading(broker, topics, handle, count=20, max_in_flight=40):
            quiet = random.sample(topics[1:], 60)
            for topic in quiet:
                handled_before[topic] = handled["hot"]
                await publisher.publish(topic, Message(b"%.6f" % time.monotonic()))
            try:
                await eventually(lambda: len(waits) == 60, what="every quiet one beside the hot one", timeout_s=60)
            finally:
                heard_all.set()
                await feeding
            await eventually(lambda: handled["hot"] == published, what="the hot one", timeout_s=120)
            await acknowledged(broker, ["hot", *quiet])
    print(
        f"the worst wait of a quiet topic beside a hot one: {1000 * max(waits.values()):.1f} ms, "
        f"in which {max(overtaken_by.values()):,} messages of the hot one were handled"
    )
    assert min(hot_left_when_heard) >= 200, "more lay in the hot one than this process may hold of it"
    assert handled == Counter({"hot": published} | dict.fromkeys(quiet, 1))


async def test_busy_topics_are_not_read_further_ahead_than_handlers_can_follow(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages without a started handler use memory: one round of reads returns at most the allowed number."""
    monkeypatch.setattr(backlog, "MAX_READ_AHEAD", 100)
    monkeypatch.setattr(reads, "MAX_MESSAGES_PER_READ", 100)
    topics = [f"t{n}" for n in range(20)]
    maximum = 0

    async def handle(message: Message) -> None:
        nonlocal maximum
        (running,) = shared._consumers[asyncio.get_running_loop()].values()
        maximum = max(maximum, sum(topic.in_flight.ready for topic in running.heartbeat.topics()))

    recorder = RecordingHandler(handle)
    async with Publisher(broker) as publisher:
        for topic in topics:
            await publisher.publish(topic, *numbered(100))
        async with reading(broker, topics, recorder, count=100, max_in_flight=100):
            await recorder.have(2_000, timeout_s=120)
            await acknowledged(broker, topics)
    assert Counter(recorder.payloads) == {b"%d" % n: 20 for n in range(100)}
    # Two rounds, because the second may arrive before the first has started, and the entries of blocking reads.
    assert maximum <= 3 * 100


async def test_broken_streams_of_each_kind_do_not_affect_others(broker: Broker) -> None:
    topics = [f"t{n}" for n in range(SOME)]
    events = EventLog()
    recorder = RecordingHandler()
    async with (
        Publisher(broker) as publisher,
        reading(events.observe(broker), topics, recorder, block_ms=200) as (_, tasks),
    ):
        await broker.delete("t7")
        await broker.set("t7", "no stream")
        await broker.delete_group("t8", "g")
        await broker.delete("t9")
        await eventually(lambda: tasks["t7"].done(), what="the one of another type to end", timeout_s=120)
        for topic in topics:
            if topic != "t7":
                await publisher.publish(topic, Message(topic.encode()))
        await eventually(
            lambda: {payload.decode() for payload in recorder.payloads} == set(topics) - {"t7"},
            what="all others",
            timeout_s=120,
        )
        assert [topic for topic, task in tasks.items() if task.done()] == ["t7"]
        with pytest.raises(WrongKeyType):
            await tasks["t7"]
    assert events.all("messaging.subscription_failed", "topic") == ["t7"]
    assert set(events.all("messaging.group_restored", "topic")) == {"t8", "t9"}


async def test_stream_without_read_permission_does_not_affect_others(redis_url: str) -> None:
    host = redis_url.removeprefix("redis://")
    async with open_broker(redis_url) as broker:
        rule = (b"ACL", b"SETUSER", b"narrow", b"on", b">secret", b"~t*", b"+@all", b"-client|unblock")
        await broker.transport.call(Command(rule))
        try:
            async with open_broker(f"redis://narrow:secret@{host}") as narrow, Publisher(broker) as publisher:
                recorder = RecordingHandler()
                subscriber = Subscriber(narrow, group="g", consumer="me", **CALM)
                topics = [f"t{n}" for n in range(50)]
                tasks = [asyncio.create_task(subscriber.consume(topic, recorder)) for topic in topics]
                with pytest.raises(PermissionDenied):
                    await subscriber.consume("elsewhere", recorder)
                await eventually(lambda: subscriber.ready, what="the others")
                for topic in topics:
                    await publisher.publish(topic, Message(b"x"))
                await recorder.have(50)
                # No read can be woken, so closing waits until the reads return by themselves after a short time.
                await asyncio.wait_for(subscriber.close(), 60)
                await asyncio.gather(*tasks)
        finally:
            await broker.transport.call(Command((b"ACL", b"DELUSER", b"narrow")))


async def test_companion_keys_without_permission_do_not_delay_other_topics(redis_url: str) -> None:
    host = redis_url.removeprefix("redis://")
    async with open_broker(redis_url) as broker:
        rule = (b"ACL", b"SETUSER", b"partial", b"on", b">secret", b"~t*", b"~{t*", b"~denied", b"+@all")
        await broker.transport.call(Command(rule))
        try:
            await broker.create_group("t1", "g", start="0")
            await broker.xadd("t1", {"payload": "abandoned"})
            assert await broker.xreadgroup("t1", "g", "dead")
            async with Publisher(broker) as publisher:
                await publisher.publish("t1", Message(b"delayed"), delay_ms=50)
            handled: set[bytes] = set()

            async def handle(message: Message) -> None:
                if message.payload == b"retried" and message.times_delivered == 1:
                    raise RetryLater(delay_ms=20)
                handled.add(message.payload)

            async with open_broker(f"redis://partial:secret@{host}") as partial:
                subscriber = Subscriber(
                    partial, group="g", group_start="0", claim_min_idle_ms=400, claim_interval_ms=50
                )
                tasks = [asyncio.create_task(subscriber.consume(topic, handle)) for topic in ("t1", "denied")]
                await eventually(lambda: subscriber.ready, what="both topics")
                await broker.xadd("t1", {"payload": "retried"})
                await eventually(lambda: handled == {b"abandoned", b"delayed", b"retried"}, what="all of t1")
                assert subscriber.ready
                await subscriber.close()
                await asyncio.gather(*tasks)
        finally:
            await broker.transport.call(Command((b"ACL", b"DELUSER", b"partial")))


async def test_streams_are_made_and_deleted_while_others_are_read(broker: Broker) -> None:
    topics = [f"t{n}" for n in range(SOME)]
    a_round = len(topics) // 10
    seed = random.randrange(10**9)
    print("seed", seed)
    chance = random.Random(seed)
    recorder = RecordingHandler()
    async with reading(broker, topics, recorder, block_ms=100):
        for number in range(20):
            for topic in chance.sample(topics, a_round):
                await broker.delete(topic)
            for topic in chance.sample(topics, a_round):
                await broker.xadd(topic, {"payload": f"{number}", "uuid": f"{topic}-{number}"})
        for topic in topics:
            await broker.xadd(topic, {"payload": f"last of {topic}", "uuid": f"{topic}-last"})
        last = {f"last of {topic}".encode() for topic in topics}
        await eventually(lambda: last <= set(recorder.payloads), what="the last of each", timeout_s=120)
        await acknowledged(broker, topics)


async def test_topics_join_and_leave_without_losing_read_entries(broker: Broker) -> None:
    steady = [f"steady-{n}" for n in range(20)]
    recorder = RecordingHandler()
    async with Publisher(broker) as publisher, reading(broker, steady, recorder) as (subscriber, _):
        for number in range(30):
            guest = f"guest-{number % 3}"
            other = Subscriber(broker, group="g", consumer="me", **CALM)
            task = asyncio.create_task(other.consume(guest, recorder))
            await publisher.publish(guest, Message(b"guest %d" % number))
            await publisher.publish(steady[number % 20], Message(b"steady %d" % number))
            if number % 2:
                await eventually(lambda n=number: b"guest %d" % n in recorder.payloads, what="the guest's message")
            await other.close()
            await task
        assert subscriber.ready
        # Entries that arrived for a topic that had left were returned, and its next subscriber gets them.
        last = Subscriber(broker, group="g", consumer="me", **CALM)
        tasks = [asyncio.create_task(last.consume(f"guest-{n}", recorder)) for n in range(3)]
        everything = {b"%s %d" % (kind, n) for kind in (b"guest", b"steady") for n in range(30)}
        await eventually(lambda: set(recorder.payloads) == everything, what="everything", timeout_s=120)
        await acknowledged(broker, [*steady, *(f"guest-{n}" for n in range(3))])
        await last.close()
        await asyncio.gather(*tasks)
    assert Counter(recorder.payloads) == Counter(everything), "nothing was handled twice"


async def test_repeated_joining_and_leaving_leaks_nothing(broker: Broker) -> None:
    async def one_round() -> None:
        subscriber = Subscriber(broker, group="g", consumer="me", **CALM)
        tasks = [asyncio.create_task(subscriber.consume(f"t{n}", RecordingHandler())) for n in range(10)]
        await eventually(lambda: len(subscriber.readiness) == 10 and subscriber.ready, what="all to be read")
        await subscriber.close()
        await asyncio.gather(*tasks)

    async def usage() -> tuple[int, int, int, int]:
        gc.collect()
        held = sum(isinstance(get_object, shared.SharedConsumer) for get_object in gc.get_objects())
        taken = 0 if broker.transport.features.embedded else await connections(broker)
        return len(asyncio.all_tasks()), held, taken, sys.getallocatedblocks()

    for _ in range(5):
        await one_round()
    before = await usage()
    for _ in range(100):
        await one_round()
    after = await usage()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 1
    print(f"blocks of memory after 100 rounds of 10 topics: {after[3] - before[3]:+,} of {before[3]:,}")
    assert after[3] - before[3] < 100 * 10, "less than one for each topic that came and left"


async def test_limits_hold_for_all_topics_together(broker: Broker) -> None:
    await limits_hold(broker, [f"t{n}" for n in range(30)])


async def test_limits_hold_on_a_cluster_where_every_topic_is_a_read_of_its_own(cluster: ClusterSetup) -> None:
    """Capacity that blocking reads have reserved does not starve other topics."""
    async with open_broker(cluster.url) as broker:
        await limits_hold(broker, [f"limits:{random.randrange(10**9)}:{n}" for n in range(30)])


async def limits_hold(broker: Broker, topics: list[str]) -> None:
    go_on = asyncio.Event()

    async def wait(message: Message) -> None:
        await go_on.wait()

    recorder = RecordingHandler(wait)
    async with Publisher(broker) as publisher:
        for topic in topics:
            await publisher.publish(topic, *numbered(20))
        options = {"max_in_flight": 10, "process_max_in_flight": 60, "process_max_bytes_in_flight": 1 << 40}
        async with reading(broker, topics, recorder, **options):

            async def held() -> int:
                return sum([(await broker.xpending(topic, "g")).count for topic in topics])

            async def full() -> bool:
                return await held() >= 30

            await eventually(full, what="the process to have its fill")
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert await held() <= 60
            go_on.set()
            await recorder.have(600, timeout_s=120)
            await acknowledged(broker, topics)


async def test_bytes_are_bounded_for_all_topics_together(broker: Broker) -> None:
    """Each topic has a backlog of unknown size, and each alone is within its own limit."""
    topics = [f"t{n}" for n in range(30)]
    go_on = asyncio.Event()
    size, maximum = 1_000, 50_000

    async def wait(message: Message) -> None:
        await go_on.wait()

    recorder = RecordingHandler(wait)
    options = {"max_in_flight": 10, "max_bytes_in_flight": 20_000, "process_max_bytes_in_flight": maximum}
    held: list[int] = []
    async with Publisher(broker) as publisher:
        for topic in topics:
            await publisher.publish(topic, *(Message(b"x" * size) for _ in range(20)))
    async with reading(broker, topics, recorder, **options):
        await eventually(lambda: recorder.running * size >= maximum // 2, what="the process to have its fill")
        for _ in range(30):
            await asyncio.sleep(0.01)
            held.append(sum([(await broker.xpending(topic, "g")).count for topic in topics]) * size)
        go_on.set()
        await recorder.have(600, timeout_s=120)
        await acknowledged(broker, topics)
    print(f"the most that was held: {max(held):,} of {maximum:,} bytes")
    assert max(held) <= maximum
    assert recorder.max_running * size <= maximum


@pytest.mark.parametrize(
    ("holder", "bound"),
    [("dead", {"process_max_in_flight": 50}), ("me", {"process_max_bytes_in_flight": 50_000})],
    ids=["of a dead consumer, messages", "under the own name, bytes"],
)
async def test_abandoned_entries_are_claimed_within_the_limits_of_the_process(
    broker: Broker, holder: str, bound: dict[str, int]
) -> None:
    """Each topic has capacity for five of them, which is 150 in total."""
    topics = [f"t{n}" for n in range(30)]
    go_on = asyncio.Event()

    async def wait(message: Message) -> None:
        await go_on.wait()

    recorder = RecordingHandler(wait)
    async with Publisher(broker) as publisher:
        for topic in topics:
            await publisher.publish(topic, *(Message(b"x" * 1_000) for _ in range(10)))
            await abandon(broker, topic, holder, count=10)
    options = {"max_in_flight": 10, "max_bytes_in_flight": 50_000, "claim_interval_ms": 50, **bound}
    async with reading(broker, topics, recorder, **options):
        (running,) = shared._consumers[asyncio.get_running_loop()].values()
        try:
            await eventually(lambda: running.capacity.messages >= 40, what="the process to have its fill", timeout_s=60)
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert running.capacity.messages <= 50
        finally:
            go_on.set()
        await recorder.have(300, timeout_s=120)
        await acknowledged(broker, topics)
    assert len(recorder.messages) == 300


async def test_read_that_fails_only_as_a_whole_is_reported(cluster: ClusterSetup) -> None:
    """As behind a proxy that allows one key per command: each stream can be read alone."""
    topics = [f"whole:{random.randrange(10**9)}:{n}" for n in range(3)]
    events = EventLog()
    async with open_broker(cluster.url) as broker:
        no_cluster = Broker(broker.transport, replace(broker.context, observer=events, cluster=False))
        subscriber = Subscriber(no_cluster, group="g", consumer="me", **CALM)
        tasks = [asyncio.create_task(subscriber.consume(topic, RecordingHandler())) for topic in topics]
        await eventually(lambda: "messaging.read_failed" in events, what="an event")
        assert not subscriber.ready
        await subscriber.close()
        await asyncio.gather(*tasks)


async def test_many_topics_on_a_cluster(cluster: ClusterSetup) -> None:
    """A read covers one slot: the first slots have blocking reads, the others are polled at a limited rate."""
    topics = [f"many:{random.randrange(10**9)}:{n}" for n in range(60)]
    async with open_broker(cluster.url) as broker, Publisher(broker) as publisher:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, block_ms=300):
            for round_ in range(3):
                for topic in topics:
                    await publisher.publish(topic, Message(b"%d" % round_))
            await recorder.have(180, timeout_s=120)
            (running,) = shared._consumers[asyncio.get_running_loop()].values()
            print(f"a polled topic is heard of within {running.reader.max_poll_ms:.0f} ms")
            assert 0 < running.reader.max_poll_ms <= 1_000
            await acknowledged(broker, topics)
        for topic in topics[:5]:
            assert not await broker.exists(companion_key(topic, "due:g"))


async def test_all_topics_continue_after_a_server_restart(tmp_path: Any) -> None:
    topics = [f"t{n}" for n in range(500)]
    with RedisProcess(["--appendonly", "yes"], directory=str(tmp_path)) as server:
        async with open_broker(server.url) as broker, Publisher(broker) as publisher:
            recorder = RecordingHandler()
            async with reading(broker, topics, recorder, block_ms=300) as (subscriber, _):
                for topic in topics:
                    await publisher.publish(topic, Message(b"before"))
                await recorder.have(500)
                await acknowledged(broker, topics)
                server.kill()
                server.start()
                for topic in topics:
                    await publisher.publish(topic, Message(b"after"))
                await eventually(lambda: recorder.payloads.count(b"after") >= 500, what="all again", timeout_s=120)
                await eventually(lambda: subscriber.ready, what="all to be read")
