"""Idle topics of a Cluster beyond the first slots: read after a reported write, and at intervals without one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
from messaging_chapters.chapter import QUICK, RecordingHandler
from test_many_topics import acknowledged, reading

from millstream import Broker, open_broker
from millstream.broker import slot_of
from millstream.messaging import Message, Publisher
from millstream.messaging.consumer import consumer as shared
from millstream.messaging.consumer.reader import WAITING_SLOTS
from millstream.messaging.consumer.shard import Shard
from millstream.testing import ClusterSetup, eventually
from millstream.testing.topologies import ask

PATIENT: dict[str, Any] = {**QUICK, "block_ms": 600_000, "claim_min_idle_ms": 3_600_000, "grace_ms": 600_000}
"""No read without a report during the test."""


@pytest.fixture
def own_cluster() -> Iterator[ClusterSetup]:
    """Its nodes are killed, and its users changed."""
    with ClusterSetup(["--appendonly", "yes"]) as setup:
        yield setup


def new_topics(count: int = 40) -> list[str]:
    prefix = f"idle:{random.randrange(10**9)}"
    return [f"{prefix}:{n}" for n in range(count)]


def polling_shards() -> list[Shard]:
    (running,) = shared._consumers[asyncio.get_running_loop()].values()
    return [shard for shard in running.reader._shards if shard.polls]


async def all_idle() -> None:
    def idle() -> bool:
        shards = polling_shards()
        polled = sum(len(shard.topics) for shard in shards)
        return polled > 0 and sum(len(shard._idle._read_at_ms) for shard in shards) == polled

    await eventually(idle, what="every polled topic to be idle")


def polled(topics: list[str]) -> list[str]:
    keys = {key for shard in polling_shards() for key in shard.topics}
    return [topic for topic in topics if topic.encode() in keys]


async def publish_to_all(broker: Broker, topics: list[str]) -> None:
    async with Publisher(broker) as publisher:
        for topic in topics:
            await publisher.publish(topic, Message(topic.encode()))


async def test_reported_writes_are_read(cluster: ClusterSetup) -> None:
    topics = new_topics()
    async with open_broker(cluster.url) as broker:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, **PATIENT):
            assert len(polled(topics)) == len({slot_of(topic.encode()) for topic in topics}) - WAITING_SLOTS
            for round_ in range(1, 4):
                await all_idle()
                await publish_to_all(broker, topics)
                await recorder.have(round_ * len(topics))
            await all_idle()
            await acknowledged(broker, topics)
    assert sorted(recorder.payloads) == sorted(topic.encode() for topic in topics * 3)


async def test_entries_that_arrive_during_reads_are_not_forgotten(cluster: ClusterSetup) -> None:
    """Bursts, alone and many at a time: an entry is in the reply of a read, or its write is reported after that."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topics = new_topics(30)
    async with open_broker(cluster.url) as broker, open_broker(cluster.url) as other, Publisher(other) as publisher:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, **PATIENT):
            sent = 0
            for _ in range(150):
                chosen = chance.choices(topics, k=chance.randint(1, 8))
                await asyncio.gather(*(publisher.publish(topic, Message(b"x")) for topic in chosen))
                sent += len(chosen)
                await asyncio.sleep(chance.choice((0, 0.001, 0.01, 0.05)))
            await recorder.have(sent)
            await acknowledged(broker, topics)


class SilentWatch:
    """Covers every key and reports nothing, as if every report were lost."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.verified: list[bytes] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def watch(self, keys: Collection[bytes], written: Callable[[bytes], None]) -> None:
        self.keys.update(keys)

    def covers(self, key: bytes) -> bool:
        return key in self.keys

    def forget(self, key: bytes) -> None:
        self.keys.discard(key)

    async def verify(self, keys: Iterable[bytes]) -> None:
        self.verified += keys


async def test_lost_reports_only_delay_entries(cluster: ClusterSetup) -> None:
    topics = new_topics()
    watch = SilentWatch()
    async with open_broker(cluster.url) as broker:
        broker.context.watch_keys = lambda: watch
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, block_ms=200):
            await all_idle()
            names = polled(topics)
            await publish_to_all(broker, topics)
            await recorder.have(len(topics))
            await acknowledged(broker, topics)
        assert sorted(watch.verified) == sorted(name.encode() for name in names)
        assert not watch.keys


async def test_group_destroyed_while_its_topic_is_idle_is_recovered(cluster: ClusterSetup) -> None:
    """With the next entry, and without one."""
    topics = new_topics()
    async with open_broker(cluster.url) as broker:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, block_ms=500):
            await all_idle()
            first, second = polled(topics)[:2]
            await broker.delete_group(first, "g")
            await broker.delete_group(second, "g")
            await publish_to_all(broker, [first])
            await recorder.have(1)

            async def recreated() -> bool:
                return all(
                    [[group.name for group in await broker.group_info(topic)] == ["g"] for topic in (first, second)]
                )

            await eventually(recreated, what="both groups to be recreated")
            await publish_to_all(broker, [second])
            await eventually(lambda: second.encode() in recorder.payloads, what="the entry of the second")


async def test_slot_of_an_idle_topic_moves(resharded_cluster: ClusterSetup) -> None:
    cluster = resharded_cluster
    topics = new_topics()
    async with open_broker(cluster.url) as broker:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, **PATIENT):
            await all_idle()
            topic = polled(topics)[-1]
            slot = slot_of(topic.encode())
            source = cluster.owner(slot)
            target = next(node for node in cluster.nodes if node is not source)
            await asyncio.to_thread(cluster.move, slot, target)
            await publish_to_all(broker, topics)
            await recorder.have(len(topics))
            await all_idle()
            await publish_to_all(broker, [topic])
            await eventually(lambda: recorder.payloads.count(topic.encode()) == 2, what="the entry at the new node")
            await acknowledged(broker, topics)
        for topic in topics:
            await broker.delete_stream(topic, companions=True)


async def test_node_that_was_killed_reports_again(own_cluster: ClusterSetup) -> None:
    topics = new_topics()
    async with open_broker(own_cluster.url) as broker:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, **PATIENT):
            await all_idle()
            node = own_cluster.owner(slot_of(polled(topics)[0].encode()))
            node.kill()
            await asyncio.to_thread(own_cluster.restart, node)
            await publish_to_all(broker, topics)
            await eventually(lambda: set(recorder.payloads) == {topic.encode() for topic in topics}, what="every topic")
            await all_idle()
            before = len(recorder.payloads)
            await publish_to_all(broker, topics)
            await recorder.have(before + len(topics))


async def test_cluster_that_refuses_tracking_is_polled(
    own_cluster: ClusterSetup, caplog: pytest.LogCaptureFixture
) -> None:
    for node in own_cluster.nodes:
        ask(node, "ACL", "SETUSER", "plain", "on", ">secret", "~*", "&*", "+@all", "-client|tracking")
    url = own_cluster.url.replace("redis+cluster://", "redis+cluster://plain:secret@")
    topics = new_topics()
    async with open_broker(url) as broker:
        recorder = RecordingHandler()
        async with reading(broker, topics, recorder, **PATIENT):
            await eventually(lambda: "CLIENT TRACKING" in caplog.text, what="the refusal in the log")
            for round_ in range(1, 3):
                await publish_to_all(broker, topics)
                await recorder.have(round_ * len(topics))
            await acknowledged(broker, topics)
    assert caplog.text.count("CLIENT TRACKING") == 1
