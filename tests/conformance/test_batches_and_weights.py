"""Batch handlers and topics with weights, over every broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.cqrs import Depends
from millstream.messaging import Backoff, DeadLetters, Handler, Output, Rejected
from millstream.messaging.handler import waits_for_turn
from millstream.messaging.middleware import circuit_breaker, retry, throttle, timeout
from millstream.testing import eventually

QUICK: dict[str, Any] = {"group_start": "0", "backoff": Backoff(initial_ms=1, max_ms=5)}


class Order(BaseModel):
    number: int


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


opened: list[int] = []


async def connect() -> str:
    opened.append(1)
    return "db"


def orders(count: int) -> list[Message]:
    return [Message(Order(number=n).model_dump_json().encode()) for n in range(count)]


async def settled(broker: Broker, topic: str) -> None:
    async def empty() -> bool:
        return [(group.lag, group.pending) for group in await broker.group_info(topic)] == [(0, 0)]

    await eventually(empty, what="everything to be read and settled")


async def test_lists_of_models_with_outputs_of_their_own(broker: Broker) -> None:
    lists: list[list[int]] = []
    opened.clear()
    router = Router(broker, **QUICK)

    @router.on("orders", group="g", batch=10, linger_ms=100, publish_to="bills")
    async def store(items: list[Order], db: Annotated[str, Depends(connect)]) -> list[Message | None]:
        lists.append([order.number for order in items])
        return [Message(b"%d" % order.number) if order.number % 2 else None for order in items]

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(25))
        async with router:
            await eventually(lambda: sum(map(len, lists)) == 25)
            await settled(broker, "orders")
    assert sorted(number for batch in lists for number in batch) == list(range(25))
    assert max(map(len, lists)) == 10
    assert len(opened) == len(lists) < 25
    assert await broker.xlen("bills") == 12


async def test_bad_message_makes_the_others_retry_once_and_is_dead_lettered(broker: Broker) -> None:
    done: Counter[int] = Counter()
    router = Router(broker, **QUICK, max_deliveries=3)

    @router.on("orders", group="g", batch=5, linger_ms=100)
    async def store(items: list[Order]) -> None:
        if any(order.number == 3 for order in items):
            raise ValueError("three")
        done.update(order.number for order in items)

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(5), Message(b"not json"))
        async with router:
            letters = DeadLetters(broker, "orders")

            async def dead_lettered() -> bool:
                return await letters.count() == 2

            await eventually(dead_lettered)
            await settled(broker, "orders")
    assert done == {0: 1, 1: 1, 2: 1, 4: 1}
    assert {item.details.deliveries for item in await letters.list() if item.details} == {1, 3}


@pytest.mark.parametrize("options", [{"max_deliveries": 1}, {"ack_policy": "reject_on_error"}])
async def test_a_timeout_of_a_batch_dead_letters_only_the_slow_message(broker: Broker, options: dict[str, Any]) -> None:
    done: Counter[int] = Counter()
    router = Router(broker, **QUICK)

    @router.on("orders", group="g", batch=5, linger_ms=1_000, middleware=[timeout(limit_ms=500)], **options)
    async def store(some: list[Order]) -> None:
        if any(order.number == 3 for order in some):
            await asyncio.sleep(3600)
        done.update(order.number for order in some)

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(5))
        async with router:
            letters = DeadLetters(broker, "orders")
            await eventually(letters.count, what="the slow message to be dead-lettered")
            await settled(broker, "orders")
    assert done == {0: 1, 1: 1, 2: 1, 4: 1}
    [letter] = await letters.list()
    assert letter.error_type == "millstream.messaging.errors.HandlerTimedOut"


async def test_a_message_whose_batch_fills_slower_than_its_timeout_is_handled_alone(broker: Broker) -> None:
    done: list[list[int]] = []
    router = Router(broker, **QUICK, max_deliveries=1)

    @router.on("orders", group="g", batch=5, linger_ms=60_000, middleware=[timeout(limit_ms=50)])
    async def store(some: list[Order]) -> None:
        done.append([order.number for order in some])

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(2))
        async with router:
            await settled(broker, "orders")
    assert sorted(done) == [[0], [1]]


async def fail_with_rejected() -> None:
    raise Rejected("three")


async def fail_with_value_error() -> None:
    raise ValueError("three")


async def fail_with_system_exit() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("fail", "options"),
    [
        (fail_with_rejected, {}),
        (fail_with_value_error, {"ack_policy": "reject_on_error"}),
        (fail_with_value_error, {"middleware": [retry(permanent=(ValueError,))]}),
        (fail_with_value_error, {"max_deliveries": 1}),
        (fail_with_system_exit, {"max_deliveries": 1}),
    ],
    ids=["rejected", "reject_on_error", "permanent", "one delivery", "system exit"],
)
async def test_a_permanent_error_of_a_batch_dead_letters_only_the_bad_message(
    broker: Broker, fail: Callable[[], Awaitable[None]], options: dict[str, Any]
) -> None:
    done: Counter[int] = Counter()
    router = Router(broker, **QUICK)

    @router.on("orders", group="g", batch=5, linger_ms=100, **options)
    async def store(items: list[Order]) -> None:
        if any(order.number == 3 for order in items):
            await fail()
        done.update(order.number for order in items)

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(5))
        async with router:
            letters = DeadLetters(broker, "orders")

            async def dead_lettered() -> bool:
                return await letters.count() > 0 and len(done) == 4

            await eventually(dead_lettered)
            await settled(broker, "orders")
    assert done == {0: 1, 1: 1, 2: 1, 4: 1}
    assert [letter.details.deliveries for letter in await letters.list() if letter.details] == [1]


async def test_messages_of_a_list_may_be_settled_one_by_one(broker: Broker) -> None:
    received: list[tuple[bytes, int]] = []
    passed: list[int] = []
    router = Router(broker, **QUICK)

    def counting(handler: Handler) -> Handler:
        async def handle(message: Message) -> Output:
            passed.append(1)
            return await handler(message)

        return handle

    @router.on("jobs", group="g", batch=3, linger_ms=100, middleware=[counting])
    async def work(messages: list[Message]) -> None:
        received.extend((entry.payload, entry.times_delivered) for entry in messages)
        for entry in messages:
            if entry.payload == b"0":
                await entry.ack()
            if entry.payload == b"1" and entry.times_delivered == 1:
                await entry.nack(delay_ms=1)
            if entry.payload == b"2":
                await entry.reject("no")
        if len(messages) > 1:
            raise ValueError("after they were settled")

    async with Publisher(broker) as publisher:
        await publisher.publish("jobs", *(Message(b"%d" % n) for n in range(3)))
        async with router:
            await eventually(lambda: (b"1", 2) in received)
            await settled(broker, "jobs")
    assert sorted(received) == [(b"0", 1), (b"1", 1), (b"1", 2), (b"2", 1)]
    assert len(passed) == 4, "middleware sees each message"
    assert await DeadLetters(broker, "jobs").count() == 1


async def test_closing_while_a_batch_fills_returns_it_uncounted(broker: Broker) -> None:
    handled: list[int] = []
    router = Router(broker, close_timeout_ms=100, **QUICK)

    @router.on("orders", group="g", batch=10, linger_ms=60_000)
    async def store(messages: list[Message]) -> None:
        handled.extend(entry.times_delivered for entry in messages)

    async with Publisher(broker) as publisher:
        await publisher.publish("orders", *orders(3))

        async def held() -> bool:
            return (await broker.xpending("orders", "g")).count == 3

        async with router:
            await eventually(held)
            await asyncio.sleep(0.1)
        again = Router(broker, **QUICK)
        again.add(store, "orders", group="g", batch=3, linger_ms=60_000)
        async with again:
            await eventually(lambda: len(handled) == 3)
    assert handled == [1, 1, 1]


async def test_topics_with_weights_share_the_starts(broker: Broker) -> None:
    order: list[str | None] = []
    router = Router(broker, **QUICK, max_in_flight=1)

    @router.on({"jobs.bulk": 1, "jobs.urgent": 3}, group="g")
    async def work(message: Message) -> None:
        order.append(message.topic)
        # The weights decide between topics that wait for the same start: here both wait while they have messages.
        gate = router.routes()[0].gate
        assert gate is not None
        await eventually(
            lambda: all(turns or order.count(topic) == 20 for topic, turns in gate._state().waiting.items()),
            what="the next of each to wait for its turn",
        )

    async with Publisher(broker) as publisher:
        await publisher.publish("jobs.bulk", *orders(20))
        await publisher.publish("jobs.urgent", *orders(20))
        async with router:
            await eventually(lambda: len(order) == 40, timeout_s=60)
            await settled(broker, "jobs.bulk")
    assert Counter(order) == {"jobs.bulk": 20, "jobs.urgent": 20}
    first = Counter(order[1:21])
    assert first["jobs.urgent"] > first["jobs.bulk"] > 0, "the weights decide, and no topic starves"


@pytest.mark.parametrize("waits_for", ["free place", "rate limit", "circuit", "batch"])
async def test_close_returns_messages_that_wait_for_their_turn(broker: Broker, waits_for: str) -> None:
    release, started = asyncio.Event(), list[bytes]()
    router = Router(broker, **QUICK)
    topic: str | dict[str, int] = "jobs"
    options: dict[str, Any] = {"max_in_flight": 1}
    waiting = {"free place": 1, "rate limit": 3, "circuit": 3, "batch": 3}[waits_for]
    if waits_for == "free place":
        topic = {"jobs": 1}
    elif waits_for == "rate limit":
        options = {"max_in_flight": 4, "middleware": [throttle(1, per_ms=60_000)]}
    elif waits_for == "circuit":
        options = {"max_in_flight": 4, "middleware": [circuit_breaker(1, reset_after_ms=60_000)]}
    elif waits_for == "batch":
        options = {"max_in_flight": 10, "batch": 4, "linger_ms": 60_000}

    async def work(message: Message) -> None:
        started.append(message.payload)
        if waits_for == "circuit":
            await message.reject("opens the circuit")
            raise ValueError("opens the circuit")
        await release.wait()

    async def work_on_list(messages: list[Message]) -> None:
        started.extend(message.payload for message in messages)

    router.on(topic, group="g", **options)(work_on_list if waits_for == "batch" else work)
    async with Publisher(broker) as publisher:
        await publisher.publish("jobs", *(Message(b"%d" % number) for number in range(waiting + 1)))
    if waits_for == "batch":
        started.append(b"no message")
        waiting = 4 - 1
        await broker.xdel("jobs", [(await broker.xrange("jobs"))[-1].id])
    async with router:
        await eventually(lambda: len(started) == 1 and sum(map(waits_for_turn, asyncio.all_tasks())) == waiting)
        closing = asyncio.create_task(router.close())
        await eventually(lambda: not any(map(waits_for_turn, asyncio.all_tasks())))
        release.set()
        await closing
    assert len(started) == 1, "no handler starts after the close has begun"
    pending = await broker.xpending_range("jobs", "g", count=10)
    assert [entry.times_delivered for entry in pending] == [0] * waiting
