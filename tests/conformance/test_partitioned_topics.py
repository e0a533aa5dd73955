"""A topic partitioned by key: one option of a router and of a publisher, with the guarantees of other topics."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import pytest
from messaging_chapters.chapter import EventLog, running
from pydantic import BaseModel

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.assignment import (
    Announcement,
    PartitionedSubscriber,
    Settings,
    balancer_stream,
)
from millstream.assignment.client import announce
from millstream.broker.scripts import leases
from millstream.cqrs import CommandBus, Depends
from millstream.errors import InvalidArgument
from millstream.messaging import (
    DeadLetters,
    Handler,
    HandlerRefused,
    Output,
    PartitionedTopic,
    partition_of,
    partition_streams,
)
from millstream.model import TrimPolicy
from millstream.testing import ClusterSetup, eventually
from millstream.wire.commands import Command

STEADY = Settings(lease_ms=60_000, renew_interval_ms=250, sweep_interval_ms=50, go_locks=False)
"""Long enough that a running member keeps its partitions on a busy machine."""


class Order(BaseModel):
    customer: str
    number: int


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", STEADY)


def order(customer: str, number: int) -> Message:
    return Message(Order(customer=customer, number=number).model_dump_json().encode(), {"key": customer})


def subscriber_of(router: Router) -> PartitionedSubscriber:
    [(_, subscriber)] = router._subscribers
    assert isinstance(subscriber, PartitionedSubscriber)
    return subscriber


async def tenant() -> str:
    return "acme"


async def test_partitioned_topic_has_the_guarantees_of_other_topics(broker: Broker) -> None:
    """Two groups, models, dependencies, middleware, outputs, retries, dead letters, delays and idempotency keys."""
    received: dict[str, list[int]] = defaultdict(list)
    passed: list[str | None] = []
    tries: list[int] = []

    def counting(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            passed.append(message.topic)
            return await handler(message)

        return handle

    router = Router(broker, group_start="0", max_deliveries=2)

    @router.on("orders", group="billing", partitions=3, middleware=[counting], publish_to="bills")
    async def bill(order: Order, owner: Annotated[str, Depends(tenant)]) -> Message:
        if order.number == 99:
            raise ValueError("never")
        received[f"{owner} {order.customer}"].append(order.number)
        return Message(b"bill")

    @router.on("orders", group="shipping", partitions=3)
    async def ship(message: Message) -> None:
        tries.append(message.times_delivered)

    async with router, Publisher(broker, partitions={"orders": 3}) as publisher:
        ids = await publisher.publish("orders", *(order(f"c{n % 4}", n) for n in range(12)))
        assert len(ids) == 12
        assert None not in ids
        for _ in range(2):
            await publisher.publish("orders", order("c1", 50), order("c2", 51), idempotency_key="once")
        await publisher.publish("orders", order("c1", 60), delay_ms=300)
        await publisher.publish("orders", order("dead", 99))
        await eventually(lambda: sum(map(len, received.values())) == 15 and len(tries) == 16, timeout_s=60)
        letters = DeadLetters(broker, f"orders.p{partition_of('dead', 3)}")
        await eventually(letters.count)
    assert received["acme c1"] == [1, 5, 9, 50, 60]
    assert received["acme c2"] == [2, 6, 10, 51]
    assert set(passed) <= set(partition_streams("orders", 3))
    assert len(passed) == 17
    assert await broker.xlen("bills") == 15


async def test_messages_of_one_key_are_in_order_while_members_come_and_go(broker_url: str, broker: Broker) -> None:
    received: dict[str, list[int]] = defaultdict(list)
    by: dict[str, set[str | None]] = defaultdict(set)

    def make(own: Broker, name: str) -> Router:
        router = Router(own, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=4, consumer=name)
        async def handle(message: Message) -> None:
            await asyncio.sleep(0.001)
            received[str(message.key)].append(int(message.payload))
            by[name].add(message.topic)

        return router

    async def publish(numbers: range) -> None:
        for number in numbers:
            await publisher.publish("orders", *(Message(b"%d" % number, {"key": f"k{k}"}) for k in range(8)))

    async with (
        Publisher(broker, partitions={"orders": 4}) as publisher,
        open_broker(broker_url) as first,
        open_broker(broker_url) as broker_b,
        make(first, "a"),
    ):
        await publish(range(20))
        async with make(broker_b, "b"):
            await publish(range(20, 40))
            await eventually(lambda: by["b"], what="the second one to handle something", timeout_s=60)
        await publish(range(40, 60))
        await eventually(lambda: sum(len(set(batch)) for batch in received.values()) == 480, timeout_s=60)
    for key, numbers in received.items():
        assert list(dict.fromkeys(numbers)) == list(range(60)), key


@pytest.mark.parametrize("name", [None, "worker"])
async def test_two_routers_of_one_name_are_two_members(
    name: str | None, broker_url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process or pod: under one name each would consider the other's partitions its own."""
    monkeypatch.setenv("POD_NAME", "web-0")

    def make(own: Broker) -> Router:
        router = Router(own, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=2, consumer=name)
        async def handle(message: Message) -> None: ...

        return router

    async def each_owns_one() -> bool:
        _, _, members = await broker.run(leases.members, balancer_stream("orders.g"))
        return sorted(int(row.split()[1]) for row in members.values()) == [1, 1]

    async with open_broker(broker_url) as first, open_broker(broker_url) as broker_b, make(first), make(broker_b):
        await eventually(each_owns_one, what="two members with a partition each", timeout_s=60)


async def test_close_waits_for_handlers_longer_than_a_lease_and_then_releases(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(STEADY, lease_ms=2_000)
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", short)
    began, go_on, done = asyncio.Event(), asyncio.Event(), []
    router = Router(broker, group_start="0")

    @router.on("orders", group="g", partitions=1)
    async def handle(message: Message) -> None:
        began.set()
        await go_on.wait()
        done.append(message.times_delivered)

    async with Publisher(broker, partitions={"orders": 1}) as publisher:
        async with router:
            await publisher.publish("orders", order("c", 1))
            await began.wait()
            asyncio.get_running_loop().call_later(2.5, go_on.set)
        assert done == [1]
        assert (await broker.xpending("orders.p0", "g")).count == 0


class SlowHandlers:
    """A router whose handlers of the message 0 wait for ``go_on``."""

    def __init__(self, broker: Broker, partitions: int) -> None:
        self.broker = broker
        self.began: list[str | None] = []
        self.go_on = asyncio.Event()
        self.cancelled: list[str | None] = []
        self.done: list[tuple[str, int, int]] = []
        self.router = Router(broker, group_start="0")
        self.router.add(self.handle, "orders", group="g", partitions=partitions)

    async def handle(self, message: Message) -> None:
        body = Order.model_validate_json(message.payload)
        if body.number == 0:
            self.began.append(message.topic)
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.append(message.topic)
                raise
        self.done.append((body.customer, body.number, message.times_delivered))


def customer_of_each(partitions: int) -> list[str]:
    """One customer for each partition."""
    names = (f"c{number}" for number in range(1000))
    found: dict[int, str] = {}
    for name in names:
        found.setdefault(partition_of(name, partitions), name)
    return [found[partition] for partition in range(partitions)]


async def test_partition_with_a_running_handler_is_handed_over_after_it(
    broker_url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that joins costs a long handler neither its work nor a delivery."""
    short = replace(STEADY, lease_ms=1_000, renew_interval_ms=100)
    monkeypatch.setitem(PartitionedSubscriber.__init__.__kwdefaults__, "settings", short)
    customers = customer_of_each(4)
    async with open_broker(broker_url) as other:
        first, second = SlowHandlers(broker, 4), SlowHandlers(other, 4)
        second.go_on.set()
        async with Publisher(broker, partitions={"orders": 4}) as publisher, first.router:
            await publisher.publish("orders", *(order(customer, 0) for customer in customers))
            await eventually(lambda: len(first.began) == 4, what="a handler on each partition")
            async with second.router:
                handing_over = subscriber_of(first.router)
                await eventually(lambda: handing_over._running and len(handing_over._running._handing_over) == 2)
                await asyncio.sleep(short.lease_ms / 1000)  # a release waits for handlers for half of it
                assert first.cancelled == []
                assert first.router.ready
                first.go_on.set()
                await eventually(lambda: len(first.done) == 4, what="the handlers")
                assert sorted(first.done) == sorted((customer, 0, 1) for customer in customers)

                await eventually(
                    lambda: len(subscriber_of(second.router).streams) == 2, what="two partitions", timeout_s=30
                )
                await publisher.publish("orders", *(order(customer, 1) for customer in customers))
                await eventually(lambda: len(first.done) + len(second.done) == 8, what="the other messages")
                assert len(second.done) == 2


async def test_idle_partitions_are_handed_over_before_those_with_a_running_handler(
    broker_url: str, broker: Broker
) -> None:
    customers = customer_of_each(4)
    async with open_broker(broker_url) as other:
        first, second = SlowHandlers(broker, 4), SlowHandlers(other, 4)
        async with Publisher(broker, partitions={"orders": 4}) as publisher, first.router:
            owner = subscriber_of(first.router)
            await eventually(lambda: len(owner.streams) == 4, what="all partitions")
            assert owner._running is not None
            taken_last = list(owner._running.client.owned)[-2:]
            busy = [owner._leased[name] for name in taken_last]
            await publisher.publish("orders", *(order(customers[int(stream[-1])], 0) for stream in busy))
            await eventually(lambda: len(first.began) == 2, what="two running handlers")
            async with second.router:
                await eventually(
                    lambda: len(subscriber_of(second.router).streams) == 2, what="two partitions", timeout_s=30
                )
                assert not set(subscriber_of(second.router).streams) & set(busy)
                first.go_on.set()


async def test_closing_router_releases_each_partition_when_its_handlers_have_ended(
    broker_url: str, broker: Broker
) -> None:
    customers = customer_of_each(4)
    async with open_broker(broker_url) as other:
        first, second = SlowHandlers(broker, 4), SlowHandlers(other, 4)
        async with Publisher(broker, partitions={"orders": 4}) as publisher:
            async with first.router:
                await publisher.publish("orders", order(customers[0], 0))
                await eventually(lambda: first.began, what="the running handler")
                closing = asyncio.create_task(first.router.close())
                async with second.router:
                    await publisher.publish("orders", *(order(customer, 1) for customer in customers))
                    await eventually(lambda: len(second.done) == 3, what="the other partitions", timeout_s=30)
                    assert not closing.done()
                    first.go_on.set()
                    await closing
                    await eventually(lambda: len(second.done) == 4, what="the last partition", timeout_s=30)
            assert first.done == [(customers[0], 0, 1)]
            assert first.cancelled == []
            assert sorted(second.done) == sorted((customer, 1, 1) for customer in customers)


class Charge(BaseModel):
    customer: str


async def test_bus_may_partition_its_topics(broker: Broker) -> None:
    done: list[str] = []
    bus = CommandBus(broker)

    @bus.handler(partitions=2)
    async def charge(command: Charge, message: Message) -> None:
        done.append(f"{command.customer} in {message.topic}")

    async with bus:
        await bus.send(Charge(customer="ada"), key="ada")
        await eventually(lambda: done)
    assert done == [f"ada in command.Charge.p{partition_of('ada', 2)}"]


async def test_outputs_may_go_to_a_partitioned_topic(broker: Broker) -> None:
    """Each output is stored with the acknowledgement of its message, in the partition of its key and in its order."""
    await partitioned_outputs(broker, "orders", "bills")


@pytest.mark.parametrize("tag", ["{shop}", ""], ids=["one slot", "many slots"])
async def test_outputs_may_go_to_a_partitioned_topic_on_a_cluster(cluster: ClusterSetup, tag: str) -> None:
    """Outputs in the input's slot are stored atomically with the acknowledgement, others before it."""
    name = f"{tag}split:{random.randrange(10**9)}"
    async with open_broker(cluster.url) as broker:
        try:
            await partitioned_outputs(broker, f"{name}:orders", f"{name}:bills")
        finally:
            for stream in (*partition_streams(f"{name}:orders", 2), *partition_streams(f"{name}:bills", 3)):
                await broker.delete_stream(stream, companions=True)


async def partitioned_outputs(broker: Broker, orders: str, bills: str) -> None:
    received: dict[str, list[int]] = defaultdict(list)
    router = Router(broker, group_start="0", max_deliveries=2)

    @router.on(orders, group="billing", partitions=2, publish_to=PartitionedTopic(bills, 3))
    async def bill(message: Message) -> list[Message]:
        if message.payload == b"99":
            return [Message(b"a bill without a customer")]
        to = str(message.key)
        return [Message(message.payload, {"key": to}), Message(message.payload, {"key": f"copy for {to}"})]

    @router.on(bills, group="mail", partitions=3)
    async def send(message: Message) -> None:
        assert message.topic == f"{bills}.p{partition_of(str(message.key), 3)}"
        received[str(message.key)].append(int(message.payload))

    async with router, Publisher(broker, partitions={orders: 2}) as publisher:
        for number in range(10):
            await publisher.publish(orders, *(Message(b"%d" % number, {"key": f"c{k}"}) for k in range(5)))
        await publisher.publish(orders, Message(b"99", {"key": "no customer"}))
        await eventually(lambda: sum(map(len, received.values())) == 100, what="all bills", timeout_s=60)
        letters = DeadLetters(broker, f"{orders}.p{partition_of('no customer', 2)}")
        await eventually(letters.count, what="the message without a partition to be dead-lettered", timeout_s=60)
    assert {key: list(range(10)) for key in received} == received
    assert len(received) == 10


async def test_unwritable_partition_does_not_affect_outputs_to_others(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Many messages are settled by one script call, which fails as a whole on a key of another type."""
    events, begun, go_on = EventLog(), Counter[str](), asyncio.Event()
    keys = [f"c{number}" for number in range(20)]
    good = [key for key in keys if partition_of(key, 3) != partition_of("c0", 3)]
    await broker.transport.call(Command((b"SET", (name := f"bills.p{partition_of('c0', 3)}".encode()), b"x"), name))

    async def bill(message: Message) -> Message:
        begun[str(message.key)] += 1
        await go_on.wait()
        return message.copy()

    async def put_out() -> list[str]:
        healthy = [stream for stream in partition_streams("bills", 3) if stream.encode() != name]
        stored = [entry.fields[b"key"].decode() for stream in healthy for entry in await broker.xrange(stream)]
        return sorted(stored)

    async def settled() -> bool:
        return (await broker.xpending("orders", "g")).count == 20 - len(good) and await put_out() == sorted(good)

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *(Message(b"x", {"key": key}) for key in keys))
    async with running(events.observe(broker), "orders", bill, publish_to=PartitionedTopic("bills", 3)):
        await eventually(lambda: len(begun) == 20, what="all to be under way", timeout_s=60)
        go_on.set()
        await eventually(settled, what="all but those of that partition to be settled", timeout_s=60)
        await eventually(
            lambda: sum(events.all("messaging.settle_failed", "entries")) == 20 - len(good),
            what="the events of those",
            timeout_s=60,
        )
    assert await put_out() == sorted(good), "each once"
    assert "could not settle" in caplog.text


async def test_fanout_handler_may_publish_to_a_partitioned_topic(broker: Broker) -> None:
    router = Router(broker)

    @router.on("flags", start="0", publish_to=PartitionedTopic("seen", 4))
    async def flag(message: Message) -> Message:
        return message.copy()

    @router.on("flags", group="g", group_start="0", ack_policy="ack_first", publish_to=PartitionedTopic("seen", 4))
    async def at_most_once(message: Message) -> Message:
        return message.copy()

    stream = f"seen.p{partition_of('me', 4)}"
    async with router, Publisher(broker) as publisher:
        await publisher.publish("flags", Message(b"on", {"key": "me"}))

        async def both() -> bool:
            return await broker.xlen(stream) == 2

        await eventually(both, what="both outputs", timeout_s=60)


async def test_options_that_cannot_be_partitioned_are_refused(broker: Broker) -> None:
    async with Publisher(broker, partitions={"orders": 2}) as publisher:
        with pytest.raises(InvalidArgument, match="metadata has a 'key'"):
            await publisher.publish("orders", order("c", 1), Message(b"x"))
        assert await broker.xlen(f"orders.p{partition_of('c', 2)}") == 0
    wrong: list[Any] = [{"orders": 0}, {"orders": "4"}, 4]
    for partitions in wrong:
        with pytest.raises(InvalidArgument, match="partitions"):
            Publisher(broker, partitions=partitions)

    async def handle(message: Message) -> None: ...

    with pytest.raises(HandlerRefused, match=r"handle.*partitions: 0"):
        Router(broker).add(handle, "orders", group="g", group_start="0", partitions=0)
    for target in (PartitionedTopic("", 2), PartitionedTopic("bills", 0), ("bills", 2), 4):
        with pytest.raises(HandlerRefused, match=r"topic|partitions|publish_to"):
            Router(broker).add(handle, "orders", group="g", group_start="0", publish_to=target)  # type: ignore[arg-type]
    with pytest.raises(HandlerRefused, match="Use a group"):
        Router(broker).add(handle, "orders", partitions=2)


async def test_routes_with_dotted_names_do_not_share_a_service(broker_url: str, broker: Broker) -> None:
    """Topic "orders" with group "eu.billing" and topic "orders.eu" with group "billing" are two services."""
    handled: Counter[str] = Counter()

    def make(own: Broker) -> Router:
        router = Router(own, group_start="0", block_ms=200)

        @router.on("orders", group="eu.billing", partitions=4)
        async def first(message: Message) -> None:
            handled["orders"] += 1

        @router.on("orders.eu", group="billing", partitions=4)
        async def second(message: Message) -> None:
            handled["orders.eu"] += 1

        return router

    async with (
        open_broker(broker_url) as broker_a,
        open_broker(broker_url) as broker_b,
        make(broker_a),
        make(broker_b),
        Publisher(broker, partitions={"orders": 4, "orders.eu": 4}) as publisher,
    ):
        for topic in ("orders", "orders.eu"):
            await publisher.publish(topic, *(Message(b"", {"key": f"k{n}"}) for n in range(40)))
        await eventually(lambda: handled == {"orders": 40, "orders.eu": 40}, timeout_s=60)


async def test_an_announcement_of_another_service_is_refused(broker: Broker) -> None:
    subscriber = PartitionedSubscriber(broker, topic="orders", partitions=2, group="g", group_start="0", block_ms=200)
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.payload)

    consuming = asyncio.create_task(subscriber.consume("orders", handle))
    await eventually(lambda: subscriber.ready and len(subscriber.streams) == 2, timeout_s=60)
    foreign = Announcement("{bills.p0}.for:g")
    entry_id = await broker.xadd(balancer_stream("orders.g"), foreign.fields())
    await eventually(lambda: not subscriber.ready, timeout_s=60)
    assert subscriber.streams == ["orders.p0", "orders.p1"]
    await broker.xdel(balancer_stream("orders.g"), [entry_id])
    await eventually(lambda: subscriber.ready, timeout_s=60)
    await subscriber.close()
    await consuming


@pytest.mark.parametrize("loss", ["delete", "trim"])
async def test_lost_announcements_are_announced_again_at_the_next_start(broker: Broker, loss: str) -> None:
    handled: list[bytes] = []

    def make() -> Router:
        router = Router(broker, group_start="0", block_ms=200)

        @router.on("orders", group="g", partitions=4)
        async def handle(message: Message) -> None:
            handled.append(message.payload)

        return router

    async with Publisher(broker, partitions={"orders": 4}) as publisher:
        async with make():
            await publisher.publish("orders", *(Message(b"1", {"key": f"k{n}"}) for n in range(40)))
            await eventually(lambda: len(handled) == 40, timeout_s=60)
        balancer = balancer_stream("orders.g")
        if loss == "delete":
            await broker.delete_stream(balancer)
        else:
            await broker.xtrim(balancer, TrimPolicy(max_len=0, approximate=False))
        await publisher.publish("orders", *(Message(b"2", {"key": f"k{n}"}) for n in range(40)))
        async with make():
            await eventually(lambda: len(handled) == 80, timeout_s=60)
    assert await broker.xlen(balancer) == 4


async def test_announcements_lost_while_members_run_are_announced_once(broker: Broker) -> None:
    router = Router(broker, group_start="0", block_ms=200)
    handled: list[bytes] = []

    @router.on("orders", group="g", partitions=4)
    async def handle(message: Message) -> None:
        handled.append(message.payload)

    balancer = balancer_stream("orders.g")
    async with router, Publisher(broker, partitions={"orders": 4}) as publisher:
        await broker.delete_stream(balancer)

        async def restored() -> bool:
            return await broker.exists(balancer) and await broker.xlen(balancer) == 4

        await eventually(restored, timeout_s=60)
        await publisher.publish("orders", *(Message(b"", {"key": f"k{n}"}) for n in range(40)))
        await eventually(lambda: len(handled) == 40, timeout_s=60)
        assert await broker.xlen(balancer) == 4


async def test_more_announcements_than_max_stream_len_are_kept() -> None:
    async with open_broker("local://", max_stream_len=10) as broker:
        for number in range(100):
            await announce(broker, "svc", f"stream-{number}")
        assert await broker.xlen(balancer_stream("svc")) == 100
