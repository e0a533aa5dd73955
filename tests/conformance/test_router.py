"""The router, the same over the embedded broker, our server and a real redis-server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream import Broker, open_broker
from millstream.broker.context import Context
from millstream.broker.keys import companion_key
from millstream.errors import InvalidArgument, WrongKeyType
from millstream.messaging.handler import HandlerRefused
from millstream.messaging.message import Message
from millstream.messaging.middleware import (
    circuit_breaker,
    correlation,
    deduplicate,
    duplicate,
    fail_randomly,
    poison_queue,
    retry,
    throttle,
)
from millstream.messaging.publisher import Publisher
from millstream.messaging.route import DuplicateRoute
from millstream.messaging.router import AlreadyRunning, Router
from millstream.model import Backoff
from millstream.testing import eventually
from millstream.wire.commands import Command

QUICK: dict[str, Any] = {"group_start": "0", "backoff": Backoff(initial_ms=1, max_ms=5)}


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


@pytest.fixture
async def publisher(broker: Broker) -> AsyncIterator[Publisher]:
    async with Publisher(broker) as opened:
        yield opened


# --- handling ---------------------------------------------------------------------------------------------------------


async def test_handlers_of_two_topics_and_two_groups_each_get_their_messages(
    broker: Broker, publisher: Publisher
) -> None:
    router = Router(broker, **QUICK)
    got: list[tuple[str, bytes]] = []

    @router.on("orders", group="billing")
    async def bill(message: Message) -> None:
        got.append(("bill", message.payload))

    @router.on("orders", group="shipping")
    def ship(message: Message) -> None:  # sync: runs in a thread
        got.append(("ship", message.payload))

    @router.on("refunds", group="billing")
    async def refund(message: Message) -> None:
        got.append(("refund", message.payload))

    async with router:
        await publisher.publish("orders", Message(b"\x00 1"), Message(b"2"))
        await publisher.publish("refunds", Message(b"3"))
        await eventually(lambda: len(got) == 5, what="all were handled")
    assert sorted(got) == [
        ("bill", b"\x00 1"),
        ("bill", b"2"),
        ("refund", b"3"),
        ("ship", b"\x00 1"),
        ("ship", b"2"),
    ]
    for topic, group in (("orders", "billing"), ("orders", "shipping"), ("refunds", "billing")):
        assert (await broker.xpending(topic, group)).count == 0


@pytest.mark.parametrize("target", ["{orders}.invoices", "invoices"], ids=["same-slot", "other-slot"])
async def test_outputs_arrive_and_carry_the_correlation(broker: Broker, publisher: Publisher, target: str) -> None:
    router = Router(broker, **QUICK)
    router.use(correlation())

    @router.on("orders", group="billing", publish_to=target)
    async def bill(message: Message) -> list[Message]:
        return [Message(b"invoice " + message.payload), Message(b"copy " + message.payload)]

    async with router:
        await publisher.publish("orders", Message(b"1", uuid="first"))
        await eventually(lambda: broker.xlen(target), what="the outputs")
        await eventually(_settled(broker, "orders", "billing"), what="the acknowledgement")
    entries = await broker.xrange(target)
    assert [entry.fields[b"payload"] for entry in entries] == [b"invoice 1", b"copy 1"]
    assert {entry.fields[b"correlation_id"] for entry in entries} == {b"first"}


async def test_failing_handler_affects_no_other_message_and_its_own_is_dead_lettered(
    broker: Broker, publisher: Publisher
) -> None:
    router = Router(broker, max_deliveries=3, **QUICK)
    tries: list[bytes] = []
    fine: list[bytes] = []

    @router.on("orders", group="broken")
    async def broken(message: Message) -> None:
        tries.append(message.payload)
        raise ValueError("cannot")

    @router.on("orders", group="works")
    async def works(message: Message) -> None:
        fine.append(message.payload)

    async with router:
        await publisher.publish("orders", Message(b"1"), Message(b"2"))
        await eventually(lambda: broker.xlen(companion_key("orders", "dlq").decode()), what="a dead letter")
        await eventually(lambda: len(tries) == 6 and len(fine) == 2, what="three tries each")
        assert router.ready


@pytest.mark.parametrize("exit_with", [SystemExit, GeneratorExit, asyncio.CancelledError])
async def test_system_exit_of_a_handler_fails_only_its_message(
    broker: Broker, publisher: Publisher, exit_with: type[BaseException]
) -> None:
    router = Router(broker, max_deliveries=1, **QUICK)
    fine: list[bytes] = []

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        if message.payload == b"exit":
            raise exit_with("3")
        fine.append(message.payload)

    async with router:
        await publisher.publish("orders", Message(b"exit"), Message(b"go on"))
        await eventually(lambda: fine == [b"go on"], what="the next message")
        await eventually(lambda: broker.xlen(companion_key("orders", "dlq").decode()), what="a dead letter")


async def test_sync_handler_may_raise_stop_iteration(broker: Broker, publisher: Publisher) -> None:
    """A StopIteration that leaves a thread would be lost, and the message would stay in flight."""
    router = Router(broker, max_deliveries=2, **QUICK)
    tries: list[bytes] = []

    @router.on("orders", group="g", max_in_flight=1)
    def handler(message: Message) -> None:
        tries.append(message.payload)
        if message.payload == b"empty":
            next(iter(()))

    async with router:
        await publisher.publish("orders", Message(b"empty"), Message(b"go on"))
        await eventually(lambda: broker.xlen(companion_key("orders", "dlq").decode()), what="a dead letter")
        await eventually(lambda: sorted(tries) == [b"empty", b"empty", b"go on"], what="the next message")


async def test_delivery_refused_by_an_open_circuit_is_not_counted(broker: Broker, publisher: Publisher) -> None:
    """A service is unavailable for a long time and every message is refused repeatedly: none is dead-lettered."""
    refused: Counter[str] = Counter()

    def observe(name: str, /, **facts: Any) -> None:
        if name == "messaging.handler_failed" and facts["error_type"] == "CircuitOpen":
            refused[facts["id"]] += 1

    watched = Broker(broker.transport, Context(observer=observe))
    router = Router(watched, max_deliveries=2, claim_interval_ms=20, **QUICK)
    calls: list[tuple[bytes, int]] = []
    back_again = asyncio.Event()

    @router.on("orders", group="g", middleware=[circuit_breaker(1, reset_after_ms=30, when_open="raise")])
    async def handler(message: Message) -> None:
        calls.append((message.payload, message.times_delivered))
        if len(calls) == 1:
            raise ConnectionError("the bank is away")
        await back_again.wait()

    async with router:
        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(8)))
        await eventually(lambda: len([n for n in refused.values() if n >= 4]) >= 6, what="four refusals each")
        back_again.set()
        await eventually(lambda: len({payload for payload, _ in calls[1:]}) == 8, what="all of them handled")
        assert await broker.xlen(companion_key("orders", "dlq").decode()) == 0
    first, *others = calls
    assert first[1] == 1
    assert dict(others) == {b"%d" % n: 2 if b"%d" % n == first[0] else 1 for n in range(8)}


async def test_retry_in_place_uses_one_delivery(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, max_deliveries=1, **QUICK)
    tries: list[int] = []

    @router.on("orders", group="g", middleware=[retry(5, initial_interval_ms=1)])
    async def handler(message: Message) -> None:
        tries.append(message.times_delivered)
        if len(tries) < 4:
            raise OSError("down")

    async with router:
        await publisher.publish("orders", Message(b""))
        await eventually(_settled(broker, "orders", "g"), what="it was settled")
        await eventually(lambda: len(tries) == 4, what="four tries")
    assert tries == [1, 1, 1, 1]
    assert await broker.xlen(companion_key("orders", "dlq").decode()) == 0


async def test_poison_topic_receives_failed_messages(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, **QUICK)
    router.use(poison_queue(publisher, "poison"))

    @router.on("orders", group="billing", name="charge")
    async def handler(message: Message) -> None:
        raise ValueError("no such customer")

    async with router:
        await publisher.publish("orders", Message(b"body", {"tenant": "a"}, "u1"))
        await eventually(_settled(broker, "orders", "billing"), what="it was settled")
    (entry,) = await broker.xrange("poison")
    assert entry.fields == {
        b"uuid": b"u1",
        b"payload": b"body",
        b"tenant": b"a",
        b"reason_poisoned": b"no such customer",
        b"topic_poisoned": b"orders",
        b"handler_poisoned": b"charge",
        b"subscriber_poisoned": b"billing",
    }


async def test_processes_that_share_a_broker_skip_each_others_duplicates(broker: Broker, publisher: Publisher) -> None:
    handled: list[str] = []

    def make(consumer: str) -> Router:
        router = Router(broker, consumer=consumer, max_in_flight=1, count=1, **QUICK)
        router.use(deduplicate(window_ms=60_000, shared=broker))

        @router.on("orders", group="g")
        async def handler(message: Message) -> None:
            handled.append(message.uuid)

        return router

    async with make("a"), make("b"):
        for _ in range(5):
            await publisher.publish("orders", *(Message(b"", uuid=f"u{n}") for n in range(4)))
        await eventually(lambda: len(handled) >= 4, what="each once")
        await eventually(_settled(broker, "orders", "g", 20), what="all were settled")
    assert sorted(handled) == ["u0", "u1", "u2", "u3"]
    remembered = await broker.transport.call(Command((b"KEYS", b"*dedup:*")))
    assert len(remembered) == 4
    assert all([0 < (await broker.ttl_ms(key) or 0) <= 60_000 for key in remembered])


async def test_idempotent_handler_tolerates_duplicates_and_random_failures(
    broker: Broker, publisher: Publisher
) -> None:
    seed = int(os.environ.get("SEED", "20241"))
    print(f"SEED={seed}")
    router = Router(broker, max_deliveries=50, **QUICK)
    router.use(duplicate(), fail_randomly(0.3, seed=seed, after=True))
    done: set[bytes] = set()

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        done.add(message.payload)

    async with router:
        await publisher.publish("orders", *(Message(b"%d" % n) for n in range(30)))
        await eventually(_settled(broker, "orders", "g", 30), what="all were settled")
    assert len(done) == 30
    assert await broker.xlen(companion_key("orders", "dlq").decode()) == 0


async def test_an_entry_of_a_plain_xadd_is_handled(broker: Broker) -> None:
    router = Router(broker, **QUICK)
    got: list[Message] = []

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        got.append(message)

        if len(got) < 3:
            raise OSError("once more")

    async with router:
        await broker.xadd("orders", {"type": "email", "to": "ann"})
        await eventually(lambda: len(got) == 3, what="three deliveries")
    assert {message.payload for message in got} == {b'{"type":"email","to":"ann"}'}
    assert len({message.uuid for message in got}) == 1


async def test_without_a_group_every_instance_gets_every_message(broker: Broker, publisher: Publisher) -> None:
    got: list[tuple[str, bytes]] = []

    def make(name: str) -> Router:
        router = Router(broker)

        @router.on("flags")
        async def handler(message: Message) -> None:
            got.append((name, message.payload))

        return router

    late = Router(broker)

    @late.on("flags", start="0")
    async def handler(message: Message) -> None:
        got.append(("late", message.payload))

    await publisher.publish("flags", Message(b"before"))
    async with make("a"), make("b"), late:
        await publisher.publish("flags", Message(b"on"))
        await eventually(lambda: len(got) == 4, what="all three")
    assert sorted(got) == [("a", b"on"), ("b", b"on"), ("late", b"before"), ("late", b"on")]
    assert await broker.group_info("flags") == []


# --- registration -----------------------------------------------------------------------------------------------------


async def test_mistakes_are_refused_at_registration_and_name_the_place(broker: Broker) -> None:
    router = Router(broker, **QUICK)

    async def bill(message: Message) -> None: ...

    async def takes_two(message: Message, other: int) -> None: ...

    async def takes_an_order(order: int) -> None: ...

    for function, topic, options, says in [
        (bill, "", {}, "topic"),
        (bill, "orders", {"publish_to": ""}, "topic"),
        (bill, "orders", {"codec": "protobuf"}, "flat, json"),
        (bill, "orders", {"ack_policy": "SOMETIMES"}, "NACK_ON_ERROR"),
        (bill, "orders", {"group_start": "yesterday"}, "group_start"),
        (bill, "orders", {"max_in_flihgt": 3}, "max_in_flihgt"),
        (bill, "orders", {"middleware": [None]}, "middleware"),
        (bill, "orders", {"group": ""}, "group"),
        (bill, "orders", {"group": None, "group_start": "0"}, "pass start"),
        (bill, "orders", {"group": None, "start": "first"}, "start"),
        (bill, "orders", {"start": "0"}, "group_start"),
        (takes_two, "orders", {}, "Take a Message"),
        (takes_an_order, "orders", {}, "Take a Message"),
    ]:
        with pytest.raises(HandlerRefused, match=says) as caught:
            router.add(function, topic, **{"group": "g", **options})
        assert f"{function.__name__} (line" in caught.value.place
    with pytest.raises(HandlerRefused, match="group_start"):
        Router(broker).add(bill, "orders", group="g")
    assert router.routes() == []


async def test_two_handlers_with_one_topic_and_group_are_refused(broker: Broker) -> None:
    router = Router(broker, **QUICK)

    @router.on("orders", group="g")
    async def first(message: Message) -> None: ...

    async def second(message: Message) -> None: ...

    with pytest.raises(DuplicateRoute, match=r"first.*second"):
        router.add(second, "orders", group="g")
    other = Router(**QUICK)
    other.add(second, "orders", group="g")
    with pytest.raises(DuplicateRoute):
        router.include(other)
    router.add(second, "orders", group="another")


async def test_included_routers_bring_their_handlers_and_middleware(broker: Broker, publisher: Publisher) -> None:
    order: list[str] = []

    def marks(name: str) -> Any:
        def middleware(handler: Any) -> Any:
            async def handle(message: Message) -> Any:
                order.append(name)
                return await handler(message)

            return handle

        return middleware

    inner = Router(**QUICK)
    inner.use(marks("inner"))

    @inner.on("orders", group="g", middleware=[marks("own 1"), marks("own 2")])
    async def handler(message: Message) -> None:
        order.append("handler")

    outer = Router(broker)
    outer.include(inner)
    outer.use(marks("outer"))
    async with outer:
        await publisher.publish("orders", Message(b""))
        await eventually(lambda: "handler" in order, what="the handler")
    assert order == ["outer", "inner", "own 1", "own 2", "handler"]
    with pytest.raises(InvalidArgument, match="broker"):
        await inner.run()


# --- life -------------------------------------------------------------------------------------------------------------


def idle(broker: Broker, **options: Any) -> Router:
    router = Router(broker, **QUICK, **options)

    @router.on("orders", group="g")
    async def handler(message: Message) -> None: ...

    return router


async def test_close_before_run_does_nothing(broker: Broker) -> None:
    router = idle(broker)
    await router.close()
    async with router:
        assert router.ready


async def test_running_twice_raises(broker: Broker) -> None:
    router = idle(broker)
    async with router:
        with pytest.raises(AlreadyRunning):
            await router.run()
        with pytest.raises(AlreadyRunning):
            router.add(lambda message: None, "late", group="g")
    with pytest.raises(AlreadyRunning):
        await router.run()
    await router.close()


async def test_a_router_without_handlers_does_not_run(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="at least one handler"):
        await Router(broker).run()


async def test_close_waits_for_what_is_in_flight(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, **QUICK)
    started, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        started.set()
        await release.wait()
        done.set()

    running = asyncio.create_task(router.run(handle_signals=False))
    await publisher.publish("orders", Message(b""))
    await started.wait()
    closing = asyncio.create_task(router.close())
    await asyncio.wait([closing], timeout=0.05)
    assert not closing.done()
    release.set()
    await asyncio.gather(closing, running)
    assert done.is_set()
    assert (await broker.xpending("orders", "g")).count == 0


async def test_close_returns_the_message_of_a_handler_that_hangs(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, close_timeout_ms=50, **QUICK)
    started = asyncio.Event()

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    async with router:
        await publisher.publish("orders", Message(b"stuck"))
        await started.wait()
    got: list[bytes] = []
    successor = Router(broker, **QUICK)

    @successor.on("orders", group="g", consumer="successor", claim_interval_ms=10)
    async def inherit(message: Message) -> None:
        got.append(message.payload)

    async with successor:
        await eventually(lambda: got == [b"stuck"], what="another consumer to handle it, long before the claim time")


async def test_message_waiting_for_its_turn_is_returned_uncounted(broker: Broker, publisher: Publisher) -> None:
    """A rate limit dead-letters no message, however often the service is restarted."""
    handled: list[int] = []
    for _ in range(4):
        router = Router(broker, close_timeout_ms=0, max_deliveries=2, **QUICK)
        router.use(throttle(1, per_ms=3_600_000))
        met = len(handled)

        @router.on("orders", group="g")
        async def handler(message: Message) -> None:
            handled.append(message.times_delivered)

        async with router:
            await publisher.publish("orders", Message(b""), Message(b""))
            await eventually(lambda met=met: len(handled) > met, what="one passes the limit")  # type: ignore[misc]
            await eventually(_pending(broker, "orders", "g", met + 1), what="the others wait in it")
    assert handled == [1, 1, 1, 1]
    assert await broker.xlen(companion_key("orders", "dlq").decode()) == 0
    assert {entry.times_delivered for entry in await broker.xpending_range("orders", "g")} == {0}


async def test_a_handler_may_close_its_router(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, **QUICK)

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        await router.close()

    await publisher.publish("orders", Message(b"stop"))
    async with asyncio.timeout(60):
        await router.run(handle_signals=False)
    assert (await broker.xpending("orders", "g")).count == 0


async def test_close_during_publishing_and_reading_does_not_deadlock(broker: Broker) -> None:
    router = idle(broker)
    publisher = Publisher(broker)

    async def publish() -> None:
        for n in range(200):
            await publisher.publish("orders", Message(b"%d" % n))

    running = asyncio.create_task(router.run(handle_signals=False))
    publishing = [asyncio.create_task(publish()) for _ in range(5)]
    await eventually(lambda: broker.xlen("orders"), what="something was published")
    async with asyncio.timeout(60):
        await asyncio.gather(router.close(), router.close())
        await running
        await asyncio.gather(*publishing)
        await publisher.close()
    assert await broker.xlen("orders") == 1000


async def test_cancelled_run_shuts_down_cleanly(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, **QUICK)
    started, release = asyncio.Event(), asyncio.Event()

    @router.on("orders", group="g")
    async def handler(message: Message) -> None:
        started.set()
        await release.wait()

    running = asyncio.create_task(router.run(handle_signals=False))
    await publisher.publish("orders", Message(b""))
    await started.wait()
    running.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await broker.xpending("orders", "g")).count == 0


async def test_signal_ends_the_router_and_signal_handlers_are_restored(broker: Broker) -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)
    try:
        router = idle(broker)
        running = asyncio.create_task(router.run())
        await eventually(lambda: router.ready, what="the router to be ready")
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await running
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is before[1]
    finally:
        signal.signal(signal.SIGTERM, before[0])


async def test_invalid_settings_raise_at_the_start(broker: Broker) -> None:
    await broker.set("orders", "not a stream")
    with pytest.raises(WrongKeyType):
        async with asyncio.timeout(60):
            await idle(broker).run(handle_signals=False)


async def test_route_that_fails_later_is_reported_and_resumed(broker: Broker, publisher: Publisher) -> None:
    router = Router(broker, **QUICK)
    got: list[bytes] = []

    @router.on("orders", group="g", block_ms=50)
    async def handler(message: Message) -> None:
        got.append(message.payload)

    @router.on("others", group="g")
    async def other(message: Message) -> None:
        got.append(message.payload)

    async with router:
        await publisher.publish("orders", Message(b"1"))
        await eventually(lambda: got == [b"1"], what="the first")
        await broker.delete("orders")
        await broker.set("orders", "not a stream")
        await publisher.publish("others", Message(b"2"))
        await eventually(lambda: got == [b"1", b"2"], what="the other topic goes on")
        await broker.delete("orders")
        await broker.xadd("orders", {"payload": "3", "uuid": "u"})
        await eventually(lambda: got == [b"1", b"2", b"3"], what="it reads again", timeout_s=60)


def _pending(broker: Broker, topic: str, group: str, count: int) -> Any:
    async def check() -> bool:
        return (await broker.xpending(topic, group)).count == count

    return check


def _settled(broker: Broker, topic: str, group: str, read: int = 1) -> Any:
    async def check() -> bool:
        for info in await broker.group_info(topic):
            if info.name == group:
                return info.pending == 0 and (info.entries_read or 0) >= read
        return False

    return check
