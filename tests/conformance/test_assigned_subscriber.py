"""Streams with one owner each, read by subscribers, in order per key while members join and leave."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.assignment import (
    AssignedSubscriber,
    Settings,
    assigned_subscriber,
    balancer_stream,
    partition_of,
    partition_streams,
)
from millstream.assignment.client import announce
from millstream.assignment.leases import OwnerRecord
from millstream.assignment.partitions import announce_partitions
from millstream.broker import Fence, companion_key
from millstream.broker.scripts import leases, settle
from millstream.errors import InvalidArgument, StaleOwner
from millstream.messaging import Handler, Message, Publisher, Subscriber
from millstream.testing import Fault, FaultyTransport, eventually
from millstream.wire.commands import Batch, Command
from support.dead_members import lease_runs_out

STEADY = Settings(lease_ms=60_000, renew_interval_ms=250, sweep_interval_ms=50)
"""Leases that do not expire while a member lives, also on a busy machine."""


@asynccontextmanager
async def worker(url: str, name: str, handler: Handler, **options: Any) -> AsyncIterator[AssignedSubscriber]:
    async with open_broker(url) as broker:
        running = assigned_subscriber(
            broker, "svc", handler, group="g", member=name, settings=STEADY, block_ms=200, **options
        )
        task = asyncio.create_task(running.run())
        try:
            yield running
        finally:
            await running.close()
            await asyncio.wait_for(task, 60)


async def owner_records(broker: Broker, *streams: str) -> list[OwnerRecord]:
    records, _ = await broker.run(leases.read_leases, streams)
    return [OwnerRecord.parse(record) for record in records]


async def test_every_message_of_every_owned_stream_is_handled(broker_url: str) -> None:
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with open_broker(broker_url) as broker:
        publisher = Publisher(broker)
        for name in ("one", "two", "three"):
            await announce(broker, "svc", name)
            await publisher.publish(name, *(Message(f"{name}-{n}".encode()) for n in range(5)))
        async with worker(broker_url, "a", handle) as a, worker(broker_url, "b", handle) as b:
            await eventually(lambda: len(handled) == 15, what="all were handled", timeout_s=60)
            await eventually(lambda: sorted(a.streams + b.streams) == ["one", "three", "two"], what="one owner each")
        assert len(set(handled)) == 15
        for name in ("one", "two", "three"):
            assert (await broker.xpending(name, "g")).count == 0
        await publisher.close()


async def test_pending_entries_of_a_dead_owner_are_handled_without_idle_time(broker_url: str) -> None:
    started: list[str] = []
    never = asyncio.Event()

    async def stuck(message: Message) -> None:
        started.append("dead")
        await never.wait()

    async def handle(message: Message) -> None:
        started.append("new owner")

    async with open_broker(broker_url) as broker:
        publisher = Publisher(broker)
        await announce(broker, "svc", "s")
        await publisher.publish("s", Message(b"x"))
        dead = assigned_subscriber(broker, "svc", stuck, group="g", member="dead", settings=STEADY, block_ms=200)
        task = asyncio.create_task(dead.run())
        await eventually(lambda: started == ["dead"], what="the first owner to start")
        for loop in (*dead.client._tasks, task, *(work for _, work in dead._running.values())):
            loop.cancel()
        await lease_runs_out(dead.client)
        async with worker(broker_url, "new owner", handle):
            await eventually(lambda: started == ["dead", "new owner"], what="the new owner to handle it", timeout_s=60)
            await eventually(lambda: _pending(broker, "s", 0), what="it to be acknowledged")
        await publisher.close()


async def _pending(broker: Any, stream: str, count: int) -> bool:
    return bool((await broker.xpending(stream, "g")).count == count)


async def test_messages_of_a_key_are_in_order_across_members(broker_url: str) -> None:
    received: dict[str, list[int]] = defaultdict(list)

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.001)
        received[str(message.key)].append(int(message.payload))

    def done() -> bool:
        return sum(len(set(numbers)) for numbers in received.values()) == 8 * 40

    async with open_broker(broker_url) as broker:
        publisher = Publisher(broker, partitions={"orders": 4})
        await announce_partitions(broker, "svc", "orders", 4)
        options: dict[str, Any] = {"ordered_by_key": True}
        async with worker(broker_url, "a", handle, **options) as a:
            await eventually(lambda: len(a.streams) == 4, what="the first one to own all partitions")
            for number in range(20):
                await publisher.publish("orders", *(Message(b"%d" % number, {"key": f"k{k}"}) for k in range(8)))
            async with worker(broker_url, "b", handle, **options) as b:
                await eventually(lambda: len(a.streams) == len(b.streams) == 2, what="an even spread", timeout_s=60)
                for number in range(20, 40):
                    await publisher.publish("orders", *(Message(b"%d" % number, {"key": f"k{k}"}) for k in range(8)))
                await eventually(done, what="all were handled", timeout_s=60)
        for key, numbers in received.items():
            first_time = list(dict.fromkeys(numbers))
            assert first_time == list(range(40)), key
        assert await broker.xlen("svc-input") == 4
        await publisher.close()


async def test_stale_token_cannot_acknowledge(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        await broker.create_group("s", "g", start="0")
        await broker.xadd("s", {"n": 1})
        [delivery] = await broker.xreadgroup("s", "g", "c")
        [number] = await broker.run(leases.take_leases, "a", [("s", None)])
        record = b"%d a" % (number or 0)
        await broker.run(leases.take_leases, "b", [("s", record)])
        stale = broker.fenced(Fence(companion_key("s", "owner"), record))
        with pytest.raises(StaleOwner):
            await stale.run(settle.ack_held, "s", "g", "c", [delivery.id], times_delivered=1)
        assert (await broker.xpending("s", "g")).count == 1
        current = await broker.get(companion_key("s", "owner"))
        fresh = broker.fenced(Fence(companion_key("s", "owner"), current or b""))
        assert (await fresh.run(settle.ack_held, "s", "g", "c", [delivery.id], times_delivered=1)).refused == []


async def test_partitions_are_announced_only_once(broker_url: str) -> None:
    async with open_broker(broker_url) as broker:
        await asyncio.gather(*(announce_partitions(broker, "svc", "orders", 3) for _ in range(5)))
        assert await broker.xlen("svc-input") == 3

        await broker.delete(*(companion_key("svc-input", f"seen.{item}") for item in "abt"))
        await announce_partitions(broker, "svc", "orders", 3)
        assert await broker.xlen("svc-input") == 3, "what was remembered is gone, but the announcements are there"

        first, *_ = await broker.xrange("svc-input")
        await broker.xadd("svc-input", {"nonsense": 1})
        await broker.xdel("svc-input", first.id)
        await announce_partitions(broker, "svc", "orders", 4)
        assert await broker.xlen("svc-input") == 5, "the finished one and the new one were announced"


async def test_partitions_are_announced_after_the_clock_was_set_back(broker_url: str) -> None:
    """A process died while it announced: its lock then expires an hour later, by the clock of the server."""
    async with open_broker(broker_url) as broker:
        lock = companion_key(balancer_stream("svc"), "announcing")
        await broker.run(leases.lock_keys, [lock], "dead", ttl_ms=3_600_000)
        async with asyncio.timeout(60):  # the lock's usual time to live is 10 s
            await announce_partitions(broker, "svc", "orders", 3)
        assert await broker.xlen("svc-input") == 3


async def test_partition_of_a_key_is_stable_and_arguments_are_checked(broker_url: str) -> None:
    assert partition_streams("orders", 2) == ["orders.p0", "orders.p1"]
    assert [partition_of(key, 16) for key in ("a", "b", "customer-7")] == [3, 9, 8]
    async with open_broker(broker_url) as broker, Publisher(broker, partitions={"orders": 2}) as publisher:
        with pytest.raises(InvalidArgument, match="key"):
            await publisher.publish("orders", Message(b"x"))
        with pytest.raises(InvalidArgument, match="partitions"):
            Publisher(broker, partitions={"orders": 0})


async def test_unreadable_stream_is_released_and_other_streams_are_read(broker_url: str) -> None:
    handled: list[bytes] = []
    released: list[str] = []

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    def observe(name: str, /, **facts: Any) -> None:
        if name == "assignment.released":
            released.extend(facts["streams"])

    async with open_broker(broker_url) as broker:
        await broker.set("no stream", "but a string")
        await announce(broker, "svc", "no stream")
        await announce(broker, "svc", "good")
        async with worker(broker_url, "a", handle, observer=observe) as running:
            await eventually(lambda: released.count("no stream") >= 2, what="released, taken again, released again")
            await Publisher(broker).publish("good", Message(b"still here"))
            await eventually(lambda: handled == [b"still here"], what="handled")
            assert running.client.ready
        assert [record.member for record in await owner_records(broker, "no stream", "good")] == ["", ""]


async def test_stream_released_before_its_notification_is_not_read(broker_url: str) -> None:
    async def handle(message: Message) -> None:
        raise AssertionError("this member does not own the stream any more")

    async with open_broker(broker_url) as broker:
        await announce(broker, "svc", "s")
        await Publisher(broker).publish("s", Message(b"for the next owner"))
        running = assigned_subscriber(broker, "svc", handle, group="g", member="a", settings=STEADY)
        notifications = running.client.start()
        await eventually(lambda: "s" in running.client.owned, what="it to be taken before its notification is received")
        await running.client.close()

        running.client.start = lambda: notifications  # type: ignore[method-assign]  # heard only now
        await asyncio.wait_for(running.run(), 60)
        assert running.streams == []


async def test_stream_is_read_again_after_an_unexpected_error(broker_url: str) -> None:
    handled: list[bytes] = []
    strikes = iter(range(2))

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    def strike(request: Command | Batch) -> Fault | None:
        asked = isinstance(request, Command) and request.args[:2] == (b"XINFO", b"GROUPS")
        return Fault(before=AttributeError("planted")) if asked and next(strikes, None) is not None else None

    async with open_broker(broker_url) as broker:
        await announce(broker, "svc", "s")
        await Publisher(broker).publish("s", Message(b"x"))
        struck = Broker(FaultyTransport(broker.transport, strike), broker.context)
        running = assigned_subscriber(struck, "svc", handle, group="g", member="a", settings=STEADY)
        task = asyncio.create_task(running.run())
        await eventually(lambda: handled == [b"x"], what="the stream to be read after all", timeout_s=60)
        await running.close()
        await asyncio.wait_for(task, 60)


async def test_error_of_a_previous_reading_does_not_release_a_retaken_stream(broker_url: str) -> None:
    """The release is delayed. Meanwhile the stream may be lost and taken again, and another subscriber reads it."""
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with open_broker(broker_url) as broker, Publisher(broker) as publisher:
        await announce(broker, "svc", "s")
        async with worker(broker_url, "a", handle) as running:
            await eventually(lambda: running.streams == ["s"] and running.ready, what="it to be read")
            now = running.client.owned["s"]
            await running._give_up(now._replace(number=now.number - 1), RuntimeError("of the turn before"))
            assert running.streams == ["s"]
            assert running.client.owned["s"] == now
            await publisher.publish("s", Message(b"x"))
            await eventually(lambda: handled == [b"x"], what="it to be handled")


async def test_entries_of_a_late_read_of_the_previous_owner_are_claimed(broker_url: str) -> None:
    """The read was sent before the stream changed its owner, and blocks on the server: XREADGROUP is not fenced."""
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    async with open_broker(broker_url) as broker, open_broker(broker_url) as former, Publisher(broker) as publisher:
        await announce(broker, "svc", "s")
        await broker.create_group("s", "g", start="0")
        stale_read = asyncio.create_task(former.xreadgroup("s", "g", "former", count=10, block_ms=60_000))

        async def it_waits() -> bool:
            facts: bytes = await broker.transport.call(Command((b"INFO", b"clients"), b"s"))
            return b"blocked_clients:0" not in facts

        await eventually(it_waits, what="the stale read to wait")
        async with worker(broker_url, "new owner", handle, claim_min_idle_ms=3_600_000) as new_owner:
            await eventually(lambda: new_owner.streams == ["s"] and new_owner.ready, what="the new owner to read")
            await publisher.publish("s", Message(b"taken by the stale read"))
            assert len(await stale_read) == 1, "the server serves the first blocked reader"
            await eventually(lambda: handled == [b"taken by the stale read"], what="it to be handled all the same")
            await publisher.publish("s", Message(b"next"))
            await eventually(lambda: len(handled) == 2, what="the next")
            await eventually(lambda: _pending(broker, "s", 0), what="both to be acknowledged")


@pytest.mark.parametrize("streams", [("s",), ("s", "t")], ids=["read that waits", "read of busy streams"])
async def test_entries_of_a_late_read_are_handled_before_later_messages_of_their_key(
    broker_url: str, streams: tuple[str, ...]
) -> None:
    """A member that is paused between checking its lease and sending XREADGROUP can receive entries between two reads
    of the new owner. Later messages of the same key must not be handled before them."""
    handled: list[bytes] = []
    go_on = asyncio.Event()

    async def handle(message: Message) -> None:
        handled.append(message.payload)
        await go_on.wait()

    def of_one_key(*payloads: bytes) -> list[Message]:
        return [Message(payload, {"key": "k"}) for payload in payloads]

    options: dict[str, Any] = {"ordered_by_key": True, "max_in_flight": 1, "claim_min_idle_ms": 3_600_000}
    async with open_broker(broker_url) as broker, Publisher(broker) as publisher:
        for stream in streams:
            await announce(broker, "svc", stream)
        async with worker(broker_url, "new owner", handle, **options) as new_owner:
            try:
                await eventually(
                    lambda: sorted(new_owner.streams) == list(streams) and new_owner.ready, what="all to be read"
                )
                await publisher.publish("s", *of_one_key(b"first", b"taken by the late read", b"next", b"last"))
                await eventually(lambda: handled == [b"first"], what="the first to begin")
                assert len(await broker.xreadgroup("s", "g", "former", count=1)) == 1
            finally:
                go_on.set()
            await eventually(lambda: len(handled) == 4, what="all of them", timeout_s=60)
            await eventually(lambda: _pending(broker, "s", 0), what="all to be acknowledged", timeout_s=60)
        assert handled == [b"first", b"taken by the late read", b"next", b"last"]


async def test_lost_streams_end_concurrently_and_restart_after_that(broker_url: str) -> None:
    """A member that was paused past its lease loses all its streams at once. A handler that does not end does not delay
    other streams, and a stream that is taken again is not read twice at the same time."""
    go_on = asyncio.Event()
    events: dict[str | None, list[str]] = defaultdict(list)

    async def handle(message: Message) -> None:
        here = events[message.topic]
        here.append("began")
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            here.append("cancelled")
            await go_on.wait()
            here.append("ended")
            raise

    streams = ["one", "two", "three"]
    async with open_broker(broker_url) as broker, Publisher(broker) as publisher:
        for name in streams:
            await announce(broker, "svc", name)
            await publisher.publish(name, Message(b"x"))
        async with worker(broker_url, "a", handle) as member:
            try:
                await eventually(lambda: len(events) == 3, what="all to have begun", timeout_s=60)
                for name in streams:
                    await broker.transport.call(
                        Command((b"SET", companion_key(name, "owner"), b"9999999999999 gone"), name.encode())
                    )
                cancelled = ["began", "cancelled"]
                await eventually(
                    lambda: all(batch == cancelled for batch in events.values()),
                    what="all to be cancelled",
                    timeout_s=60,
                )
                await eventually(
                    lambda: sorted(member.streams) == sorted(streams), what="all taken again", timeout_s=60
                )
                assert all(batch == cancelled for batch in events.values()), "no stream was read twice at a time"
                go_on.set()
                again = [*cancelled, "ended", "began"]
                await eventually(
                    lambda: all(batch[:4] == again for batch in events.values()), what="all again", timeout_s=60
                )
            finally:
                go_on.set()


async def test_stream_taken_over_by_another_member_is_not_reported_as_failed(
    broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="millstream.messaging")
    async with open_broker(broker_url) as broker:
        [number] = await broker.run(leases.take_leases, "a", [("s", None)])
        record = b"%d a" % (number or 0)
        await broker.create_group("s", "g", start="0")
        await broker.xadd("s", {"data": b"first"})
        await broker.xreadgroup("s", "g", "me")
        mine = broker.fenced(Fence(companion_key("s", "owner"), record))
        await broker.run(leases.take_leases, "b", [("s", record)])
        subscriber = Subscriber(mine, group="g", group_start="0", consumer="me")
        with pytest.raises(StaleOwner):
            async with asyncio.timeout(60):
                await subscriber.consume("s", lambda _: asyncio.sleep(0))
    levels = {item.levelname for item in caplog.records if item.getMessage().startswith("reading s ended")}
    assert levels == {"INFO"}
