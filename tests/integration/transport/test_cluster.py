"""Cluster: requests reach the node of their key, redirections are followed, companion keys share the slot."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio

from millstream import open_blocking_broker, open_broker
from millstream.broker.keys import slot_of
from millstream.errors import InvalidArgument
from millstream.testing import ClusterSetup
from millstream.testing.conformance import (
    AppendOnceChapter,
    AppendUniqueChapter,
    GroupChapter,
    KeyChapter,
    PendingChapter,
    ReadingChapter,
    TrimmingChapter,
    Unblocked,
    WritingChapter,
)
from millstream.testing.topologies import ask


@asynccontextmanager
async def opened(url: str, kind: str) -> AsyncIterator[Any]:
    if kind == "async":
        async with open_broker(url) as broker:
            yield broker
    else:
        unblocked = Unblocked(open_blocking_broker(url))
        yield unblocked
        await unblocked.close()


@pytest.fixture(params=["async", "blocking"])
async def broker(cluster: ClusterSetup, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with opened(cluster.url, request.param) as broker:
        yield broker


class TestWriting(WritingChapter):
    pass


class TestReading(ReadingChapter):
    pass


class TestGroups(GroupChapter):
    pass


class TestPending(PendingChapter):
    pass


class TestAppendOnce(AppendOnceChapter):
    pass


class TestAppendUnique(AppendUniqueChapter):
    pass


class TestTrimming(TrimmingChapter):
    pass


class TestKeys(KeyChapter):
    pass


async def test_streams_of_all_nodes_are_listed(broker: Any, cluster: ClusterSetup) -> None:
    prefix = uuid4().hex
    names = sorted(f"{prefix}:{n}" for n in range(30))
    for name in names:
        await broker.xadd(name, {"n": 1})

    assert await broker.list_streams(f"{prefix}:*") == names
    assert len({cluster.owner(slot_of(name.encode())).port for name in names}) == 3


async def test_streams_of_several_slots_cannot_be_read_at_once(broker: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await broker.xread({"a": "0", "b": "0"})

    assert "hash tag" in str(caught.value)


@pytest.mark.parametrize("kind", ["async", "blocking"])
async def test_requests_continue_while_a_slot_moves(resharded_cluster: ClusterSetup, kind: str) -> None:
    """Before, during (ASK) and after (MOVED) the move: every write is stored once, and every read finds it."""
    cluster = resharded_cluster
    stream = f"moving:{uuid4().hex}"
    slot = slot_of(stream.encode())
    neighbour = f"{{{stream}}}\udcff"  # other keys of the slot move with it, whatever their names are
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    async with opened(cluster.url, kind) as broker:
        await broker.xadd(neighbour, {"n": 0})
        await broker.create_group(stream, "g", start="0")
        await broker.xadd(stream, {"n": 0})
        await asyncio.to_thread(cluster.begin_move, slot, target)
        await broker.xadd(stream, {"n": 1})  # the key is still on the source node
        await asyncio.to_thread(ask, source, "MIGRATE", "127.0.0.1", str(target.port), "", "0", "5000", "KEYS", stream)
        await broker.xadd(stream, {"n": 2})  # ASK
        await broker.xadd_many(stream, [{"n": 3}, {"n": 4}])  # ASK for each
        atomic = asyncio.create_task(broker.xadd_many(stream, [{"n": 5}, {"n": 6}], atomic=True))  # waits
        await asyncio.to_thread(cluster.end_move, slot, target)
        await atomic
        await broker.append_once(stream, "w", 1, 0, [{"n": 7}])  # MOVED

        deliveries = await broker.xreadgroup(stream, "g", "c", count=100, block_ms=100)
        assert [int(delivery.fields[b"n"]) for delivery in deliveries] == list(range(8))
        assert await broker.xlen(neighbour) == 1


async def test_keyspace_events_of_all_nodes_arrive_once(cluster: ClusterSetup) -> None:
    for node in cluster.nodes:
        ask(node, "CONFIG", "SET", "notify-keyspace-events", "K$")
    keys = {f"event:{os.getpid()}:{n}" for n in range(20)}
    async with open_broker(cluster.url) as broker, broker.listen(["__keyspace@0__:event:*", "news"]) as listener:
        for key in keys:
            await broker.set(key, 1)
        await broker.publish("news", "end")
        heard = []
        async with asyncio.timeout(60):
            async for channel, _payload in listener:
                heard.append(channel.decode())
                if len(heard) == len(keys) + 1:
                    break

    assert sorted(heard) == sorted(["news", *(f"__keyspace@0__:{key}" for key in keys)])


async def test_redis_py_cluster_clients_are_accepted(cluster: ClusterSetup) -> None:
    place = {"host": "127.0.0.1", "port": cluster.nodes[0].port}
    name = uuid4().hex

    theirs = redis.asyncio.RedisCluster(**place)
    async with open_broker(theirs) as broker:
        await broker.xadd(name, {"n": 1})
    await theirs.aclose()
    with open_blocking_broker(redis.RedisCluster(**place)) as blocking:
        assert blocking.xlen(name) == 1


async def test_batch_over_keys_of_many_nodes(cluster: ClusterSetup) -> None:
    from millstream.wire.commands import Batch

    names = [f"spread:{uuid4().hex}".encode() for _ in range(20)]
    batch = Batch([(b"XADD", name, b"5-5", b"n", b"1") for name in names], keys=names)
    async with open_broker(cluster.url) as broker:
        assert await broker.transport.call_many(batch) == [b"5-5"] * 20
