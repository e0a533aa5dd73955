"""local:// brokers are shared in the process by address, and live as long as one of their handles."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from millstream import BlockingBroker, open_blocking_broker, open_broker
from millstream.broker import Fence, companion_key
from millstream.broker.scripts import delayed, settle
from millstream.broker.scripts.settle import Output
from millstream.errors import BrokerClosed, DurabilityUnavailable, InvalidArgument, OutOfMemory
from millstream.testing import eventually


@pytest.fixture
def name() -> str:
    return f"local://{uuid4().hex}"


def test_named_local_broker_is_shared(name: str) -> None:
    first, second, other_name = open_blocking_broker(name), open_blocking_broker(name), open_blocking_broker(f"{name}x")
    first.set("k", 1)

    assert second.get("k") == b"1"
    assert other_name.get("k") is None

    first.close()
    assert second.get("k") == b"1"
    with pytest.raises(BrokerClosed):
        first.get("k")
    second.close()
    with open_blocking_broker(name) as later:
        assert later.get("k") is None
    other_name.close()


def test_async_and_blocking_brokers_share_data(name: str) -> None:
    blocking = open_blocking_broker(name)

    async def write() -> None:
        async with open_broker(name) as broker:
            await broker.xadd("s", {"n": 1})

    asyncio.run(write())
    assert blocking.xlen("s") == 1
    blocking.close()


def test_handle_counts_before_its_first_use(name: str) -> None:
    keeper = open_blocking_broker(name)
    with open_blocking_broker(name) as writer:
        writer.set("k", 1)

    assert keeper.get("k") == b"1"
    keeper.close()


def test_forgotten_handle_is_released(name: str) -> None:
    open_blocking_broker(name).set("k", 1)
    gc.collect()

    with open_blocking_broker(name) as broker:
        assert broker.get("k") is None


def test_directory_is_durable_and_identified_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with (
        open_blocking_broker(f"local://{tmp_path}/data") as first,
        open_blocking_broker(f"local://{tmp_path}/link") as two,
    ):
        first.xadd("s", {"n": 1}, durability="appended")
        assert two.xlen("s") == 1
        with pytest.raises(DurabilityUnavailable):
            first.xadd("s", {"n": 2}, durability="fsynced")

    with open_blocking_broker(f"local://{tmp_path}/data?appendfsync=always") as again:
        assert again.xlen("s") == 1
        again.xadd("s", {"n": 2}, durability="fsynced")
        assert again.transport.features.survives_restart


def test_two_policies_for_one_directory(tmp_path: Path) -> None:
    with open_blocking_broker(f"local://{tmp_path}?appendfsync=always") as first:
        first.ping()
        with open_blocking_broker(f"local://{tmp_path}?appendfsync=no") as second, pytest.raises(InvalidArgument):
            second.ping()
        with open_blocking_broker(f"local://{tmp_path}") as third:
            third.ping()


def test_streams_are_trimmed_automatically(name: str) -> None:
    with open_blocking_broker(name, max_stream_len=100) as broker:
        for n in range(30):
            broker.xadd_many("s", [{"n": n}] * 10)
        assert 100 <= broker.xlen("s") <= 120
        broker.create_group("s", "g", start="0")
        for n in range(30):
            broker.xadd_many("s", [{"n": n}] * 10)
        assert broker.xlen("s") >= 400, "the group has read nothing: nothing may go"


def once(broker: BlockingBroker, n: int) -> None:
    broker.append_once("s", "w", n, 0, [{"n": n}] * 10)


def once_written(broker: BlockingBroker, n: int) -> None:
    with broker.once_writer("s", "w", n) as writer:
        writer.append([{"n": n}] * 10)


def put_out(broker: BlockingBroker, n: int) -> None:
    broker.delete("in")
    broker.xadd("in", {"n": n})
    broker.create_group("in", "g", start="0")
    (xreadgroup,) = broker.xreadgroup("in", "g", "me")
    broker.run(settle.ack_with_outputs, "in", "g", "me", [Output(xreadgroup.id, 1, [("s", {"n": n})] * 10)])


def later(broker: BlockingBroker, n: int) -> None:
    broker.run(delayed.publish_later, "s", [(f"{n}-{i}", {"n": n}) for i in range(10)], delay_ms=0)
    broker.run(delayed.publish_due, "s")


def owned(broker: BlockingBroker, n: int) -> None:
    broker.set("{s}.owner", b"1 me")
    mine = broker.fenced(Fence(companion_key("s", "owner"), b"1 me"))
    for _ in range(10):
        mine.xadd("s", {"n": n})


@pytest.mark.parametrize(
    "add",
    [
        *(once, once_written, put_out, later, owned),
        lambda broker, n: [broker.xadd("s", {"n": n}, id=f"{n + 1}-*") for _ in range(10)],
        lambda broker, n: [broker.xadd("s", {"n": n}, durability="memory") for _ in range(10)],
        lambda broker, n: broker.xadd_many("s", [{"n": n}] * 10, atomic=True),
        lambda broker, n: broker.append_unique("s", [(f"{n}-{i}", {"n": n}) for i in range(10)]),
    ],
)
def test_every_append_operation_trims_streams(name: str, add: Callable[[BlockingBroker, int], None]) -> None:
    with open_blocking_broker(name, max_stream_len=100) as broker:
        for n in range(30):
            add(broker, n)
        assert 100 <= broker.xlen("s") <= 120


def test_closing_twice(name: str) -> None:
    broker = open_blocking_broker(name)
    broker.close()
    broker.close()


async def test_closing_wakes_waiters(name: str) -> None:
    broker = open_broker(name)
    reader = asyncio.create_task(broker.xread({"s": "$"}, block_ms=0))

    async def is_blocked() -> bool:
        return (await broker.server_info("clients"))["blocked_clients"] != "0"

    await eventually(is_blocked, what="the read to wait")
    await broker.close()

    with pytest.raises(BrokerClosed):
        await reader


async def test_closing_while_the_journal_is_read_leaves_nothing_open(tmp_path: Path) -> None:
    for _ in range(20):
        broker = open_broker(f"local://{tmp_path}/data")
        write = asyncio.create_task(broker.xadd("s", {"n": 1}))
        await asyncio.sleep(0)  # it reads the journal now, in a thread
        await broker.close()
        with pytest.raises(BrokerClosed):
            await write
        async with open_broker(f"local://{tmp_path}/data") as again:
            assert await again.xlen("s") == 0


async def test_closed_while_it_was_being_opened_it_stays_closed(tmp_path: Path) -> None:
    async with open_broker(f"local://{tmp_path}/data") as other:
        assert await other.xlen("s") == 0
        broker = open_broker(f"local://{tmp_path}/data")
        first = asyncio.create_task(broker.xlen("s"))
        await asyncio.sleep(0)
        await broker.close()
        with pytest.raises(BrokerClosed):
            await first
        with pytest.raises(BrokerClosed):
            await broker.xlen("s")


def fill(broker: BlockingBroker) -> None:
    for _ in range(1000):
        broker.xadd("s", {"a": "x" * 1000})


def test_memory_can_be_limited_by_the_url(name: str) -> None:
    with open_blocking_broker(f"{name}?maxmemory=64kb", max_stream_len=None) as broker:
        with pytest.raises(OutOfMemory):
            fill(broker)
        length = broker.xlen("s")
        assert 0 < length < 1000
        assert len(broker.xrange("s")) == length
        broker.delete("s")
        broker.xadd("s", {"a": "b"})
        with open_blocking_broker(name) as same:
            assert same.xlen("s") == 1
        other = open_blocking_broker(f"{name}?maxmemory=1mb")
        with pytest.raises(InvalidArgument, match="open already"):
            other.xlen("s")
        other.close()


@pytest.mark.parametrize("query", ["maxmemory=", "maxmemory=x", "maxmemory=5k", "maxmemory=-1", "memory=5"])
def test_unknown_url_option_is_rejected(query: str) -> None:
    with pytest.raises(InvalidArgument):
        open_blocking_broker(f"local://?{query}")


def test_directory_url_accepts_both_options(tmp_path: Path) -> None:
    with open_blocking_broker(f"local://{tmp_path}?appendfsync=always&maxmemory=1mb") as broker:
        broker.xadd("s", {"a": "b"})
