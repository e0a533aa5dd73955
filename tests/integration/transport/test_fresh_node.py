"""Slots that move to a node without our scripts: readers and writers continue."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from millstream import Publisher, open_blocking_broker, open_broker
from millstream.broker.keys import slot_of
from millstream.errors import DurabilityUnavailable, MillstreamError
from millstream.messaging import Message
from millstream.testing import ClusterSetup, RedisProcess, eventually
from millstream.testing.topologies import ask

MOVES = int(os.environ.get("TRIALS", "3"))


@pytest.fixture(scope="module")
def growing() -> Iterator[ClusterSetup]:
    with ClusterSetup() as setup:
        yield setup


@pytest.fixture
def fresh(growing: ClusterSetup) -> RedisProcess:
    return growing.add_node()


def move(cluster: ClusterSetup, slot: int, target: RedisProcess) -> None:
    """Moves a slot as resharding does: key after key, while both nodes serve the slot."""
    source = cluster.begin_move(slot, target)
    keys: list[bytes] = ask(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "1000")
    for key in keys:
        ask(source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", key)
    cluster.end_move(slot, target)


async def test_script_is_loaded_on_the_node_of_its_key(growing: ClusterSetup, fresh: RedisProcess) -> None:
    """During (ASK) and after (MOVED) the move: for a plain call, for one that waits for replicas, and for threads."""
    async with open_broker(growing.url) as broker:
        stream = "asked"
        slot = slot_of(stream.encode())
        await broker.append_once(stream, "w", 1, 0, [{"n": 0}])
        source = await asyncio.to_thread(growing.begin_move, slot, fresh)
        keys = ask(source, "CLUSTER", "GETKEYSINSLOT", str(slot), "1000")
        ask(source, "MIGRATE", "127.0.0.1", str(fresh.port), "", "0", "5000", "KEYS", *keys)
        await broker.append_once(stream, "w", 1, 1, [{"n": 1}])  # the source node redirects it
        ask(fresh, "SCRIPT", "FLUSH")
        with pytest.raises(DurabilityUnavailable):  # it was stored, and no replica has confirmed
            await broker.append_once(stream, "w", 1, 1, [{"n": 1}], durability="replicated(1)")
        ask(fresh, "SCRIPT", "FLUSH")
        with open_blocking_broker(growing.url) as blocking:
            await asyncio.to_thread(blocking.append_once, stream, "w", 1, 2, [{"n": 2}])
        await asyncio.to_thread(growing.end_move, slot, fresh)
        ask(fresh, "SCRIPT", "FLUSH")
        await broker.append_once(stream, "w", 1, 3, [{"n": 3}])
        assert [int(entry.fields[b"n"]) for entry in await broker.xrange(stream)] == [0, 1, 2, 3]


async def test_publishers_continue_while_slots_move(growing: ClusterSetup, fresh: RedisProcess) -> None:
    topics = [f"moving-{n}" for n in range(4)]
    confirmed: dict[str, set[bytes]] = {topic: set() for topic in topics}
    failed: list[Exception] = []
    numbers = itertools.count()
    going = True

    async def publish(publisher: Publisher, topic: str) -> None:
        while going:
            text = b"%d" % next(numbers)
            try:
                await publisher.publish(topic, Message(text))
            except MillstreamError as error:
                failed.append(error)
            else:
                confirmed[topic].add(text)

    def enough(more: int) -> Any:
        before = sum(map(len, confirmed.values()))
        return eventually(lambda: sum(map(len, confirmed.values())) > before + more, what="publishes")

    async with open_broker(growing.url) as broker:
        async with Publisher(broker) as publisher:
            tasks = [asyncio.create_task(publish(publisher, topic)) for topic in topics]
            try:
                for _ in range(MOVES):
                    for topic in topics:
                        await enough(20)
                        slot = slot_of(topic.encode())
                        here = await asyncio.to_thread(growing.owner, slot)
                        target = fresh if here is not fresh else growing.nodes[0]
                        await asyncio.to_thread(ask, target, "SCRIPT", "FLUSH")
                        await asyncio.to_thread(move, growing, slot, target)
                await enough(20)
            finally:
                going = False
                await asyncio.gather(*tasks)
        print(f"{MOVES * len(topics)} moves, {next(numbers)} published, {len(failed)} failed")
        assert not failed, failed[:3]
        for topic in topics:
            stored = [entry.fields[b"payload"] for entry in await broker.xrange(topic)]
            assert len(stored) == len(set(stored)), "stored twice"
            assert set(stored) == confirmed[topic]
