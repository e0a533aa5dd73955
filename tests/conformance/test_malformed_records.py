"""A malformed record affects the streams that it belongs to, and not the whole service."""

from __future__ import annotations

import logging

import pytest

from millstream import Message, Publisher, Router, open_broker
from millstream.assignment import PartitionedSubscriber, Settings, balancer_stream
from millstream.broker import companion_key
from millstream.messaging import partition_of
from millstream.testing import eventually
from millstream.wire.commands import Command

STEADY = Settings(lease_ms=60_000, renew_interval_ms=100, sweep_interval_ms=50, go_locks=False)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", STEADY)


async def test_malformed_owner_record_affects_its_partition_only(
    broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    handled: set[bytes] = set()
    record = companion_key("{orders.p1}.for:g", "owner")
    healthy = {key.encode() for key in map(str, range(30)) if partition_of(key, 3) != 1}
    async with open_broker(broker_url) as broker, Publisher(broker, partitions={"orders": 3}) as publisher:
        await broker.transport.call(Command((b"SET", record, b"garbage"), record))
        router = Router(broker, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=3)
        async def handle(message: Message) -> None:
            handled.add(message.payload)

        await publisher.publish("orders", *(Message(b"%d" % n, {"key": str(n)}) for n in range(30)))
        running = router._start()
        await eventually(lambda: handled == healthy, what="the other partitions to be handled", timeout_s=30)
        await eventually(lambda: "garbage" in caplog.text, what="the record to be logged", timeout_s=30)
        reader = router._subscribers[0][1]
        assert isinstance(reader, PartitionedSubscriber)
        assert reader._running is not None
        assert not router.ready
        assert reader._running.readiness["orders.p1"] is False
        await broker.delete(record)
        await eventually(lambda: len(handled) == 30, what="the repaired partition to be handled", timeout_s=30)
        await eventually(lambda: router.ready, timeout_s=30)
        await router.close()
        await running
    logged = [item for item in caplog.records if item.levelno == logging.ERROR and "orders.p1" in item.getMessage()]
    assert len(logged) == 1


async def test_owned_stream_whose_record_becomes_malformed_is_not_reported_as_taken_over(
    broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = companion_key("{orders.p0}.for:g", "owner")
    async with open_broker(broker_url) as broker:
        router = Router(broker, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=1)
        async def handle(message: Message) -> None: ...

        async with router:
            reader = router._subscribers[0][1]
            assert isinstance(reader, PartitionedSubscriber)
            await eventually(lambda: reader.streams, what="the partition to be owned")
            await broker.transport.call(Command((b"SET", record, b"garbage"), record))
            await eventually(lambda: not reader.streams, what="the record to be noticed")
            await broker.delete(record)
    messages = [one.getMessage() for one in caplog.records if one.name == "millstream.assignment.ownership"]
    assert [text for text in messages if "garbage" in text]
    assert not [text for text in messages if "taken over" in text]


@pytest.mark.parametrize("row", [b"notanumber x y", b"", b"9999999999999 x 5"])
async def test_malformed_member_row_is_ignored(row: bytes, broker_url: str, caplog: pytest.LogCaptureFixture) -> None:
    handled: set[bytes] = set()
    balancer = balancer_stream("orders.g")
    table = companion_key(balancer, "members")
    async with open_broker(broker_url) as broker, Publisher(broker, partitions={"orders": 2}) as publisher:
        await broker.transport.call(Command((b"HSET", table, b"ghost", row), table))
        router = Router(broker, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=2)
        async def handle(message: Message) -> None:
            handled.add(message.payload)

        async with router:
            await publisher.publish("orders", *(Message(b"%d" % n, {"key": str(n)}) for n in range(10)))
            await eventually(lambda: len(handled) == 10, timeout_s=30)
    assert [record.levelname for record in caplog.records if "'ghost'" in record.getMessage()] == ["ERROR"]
