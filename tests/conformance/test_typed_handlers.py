"""Handlers of a router that take bodies and dependencies, as those of the buses do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.cqrs import Depends
from millstream.errors import InvalidArgument
from millstream.messaging import DeadLetters, PydanticMarshaler
from millstream.testing import eventually


class Order(BaseModel):
    number: int
    customer: str


@dataclass
class Bill:
    order: int


class Note(TypedDict):
    text: str


@pytest.fixture
async def broker(broker_url: str) -> AsyncIterator[Broker]:
    async with open_broker(broker_url) as opened:
        yield opened


closed: list[str] = []


def open_db() -> Iterator[str]:
    yield "the database"
    closed.append("the database")


async def who(message: Message) -> str:
    return message.metadata["who"]


async def test_models_dependencies_and_outputs(broker: Broker) -> None:
    closed.clear()
    received: list[object] = []
    router = Router(broker, group_start="0")

    @router.on("orders", group="billing", publish_to="bills")
    async def bill(order: Order, db: Annotated[str, Depends(open_db)], by: str = Depends(who)) -> Bill:
        received.append((order.number, order.customer, db, by))
        return Bill(order.number)

    @router.on("bills", group="posting", publish_to="notes")
    def post(bill: Bill, message: Message) -> list[Message]:
        received.append((bill, message.metadata["name"]))
        return [Message(b'{"text": "posted"}')]

    @router.on("notes", group="reading")
    async def read(note: Note) -> None:
        received.append(note)

    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b'{"number": 7, "customer": "ada"}', {"who": "web"}))
        await eventually(lambda: len(received) == 3)
    assert received == [(7, "ada", "the database", "web"), (Bill(7), "Bill"), {"text": "posted"}]
    assert closed == ["the database"]


async def test_unreadable_body_is_dead_lettered_at_once_with_the_reason(broker: Broker) -> None:
    router = Router(broker)
    received: list[Order] = []

    @router.on("orders", group="billing", group_start="0")
    async def bill(order: Order) -> None:
        received.append(order)

    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b'{"number": "x", "customer": "ada"}'), Message(b"no json"))
        letters = DeadLetters(broker, "orders")

        async def dead_lettered() -> bool:
            return await letters.count() == 2

        await eventually(dead_lettered)
    first = (await letters.list())[0]
    assert first.details is not None
    assert (received, first.details.deliveries) == ([], 1)
    assert {item.details.error_type for item in await letters.list() if item.details} == {
        "millstream.messaging.errors.CannotUnmarshal"
    }


async def test_dependencies_can_be_replaced_in_the_router_that_runs(broker: Broker) -> None:
    received: list[str] = []
    shop = Router()

    @shop.on("orders", group="billing", group_start="0")
    async def bill(message: Message, db: Annotated[str, Depends(open_db)]) -> None:
        received.append(db)

    router = Router(broker)
    router.include(shop)
    router.dependency_overrides[open_db] = lambda: "a stand-in"
    async with router, Publisher(broker) as publisher:
        await publisher.publish("orders", Message(b"1"))
        await eventually(lambda: received == ["a stand-in"])


async def test_publish_accepts_models_and_dataclasses(broker: Broker) -> None:
    received: list[object] = []
    router = Router(broker, group_start="0")

    @router.on("orders", group="billing")
    async def on_order(order: Order) -> None:
        received.append(order)

    @router.on("bills", group="billing")
    async def on_bill(bill: Bill, message: Message) -> None:
        received.append((bill, message.metadata["name"]))

    async with router, Publisher(broker) as publisher:
        (entry_id,) = await publisher.publish("orders", Order(number=7, customer="ada"))
        assert entry_id is not None
        await publisher.publish("orders", Order(number=8, customer="bob"), idempotency_key="order 8")
        await publisher.publish("orders", Order(number=9, customer="eve"), delay_ms=0)
        await publisher.publish("bills", Bill(7), Message(b'{"order": 8}', {"name": "Bill"}))
        await eventually(lambda: len(received) == 5)
    assert {order.number for order in received if isinstance(order, Order)} == {7, 8, 9}
    assert (Bill(7), "Bill") in received
    assert (Bill(8), "Bill") in received


@pytest.mark.parametrize("kind", ["async", "sync", "list"])
async def test_handler_of_messages_may_return_models(broker: Broker, kind: str) -> None:
    router = Router(broker, group_start="0")
    billed: list[Bill] = []

    async def in_loop(message: Message) -> Bill:
        return Bill(7)

    def in_thread(message: Message) -> Bill:
        return Bill(7)

    async def several(message: Message) -> list[Bill]:
        return [Bill(7)]

    functions = {"async": in_loop, "sync": in_thread, "list": several}
    router.on("orders", group="g", publish_to="bills", max_deliveries=1)(functions[kind])

    @router.on("bills", group="g")
    async def collect(bill: Bill) -> None:
        billed.append(bill)

    async with Publisher(broker) as publisher, router:
        await publisher.publish("orders", Message(b"x"))
        await eventually(lambda: billed, what="the bill")
    assert billed == [Bill(7)]


async def test_publish_of_a_dict_says_how_to_publish_it(broker: Broker) -> None:
    async with Publisher(broker) as publisher:
        with pytest.raises(InvalidArgument) as refused:
            await publisher.publish("orders", {"number": 7})  # type: ignore[arg-type]
        assert "json.dumps" in str(refused.value)
        await publisher.publish("orders", Message(json.dumps({"number": 7}).encode()))


async def test_publish_refuses_bodies_without_a_marshaler(broker: Broker) -> None:
    async with Publisher(broker, partitions={"split": 2}) as publisher:
        for body in ({"number": 7}, b"7", "7", None, Order, Bill):
            for way in ({}, {"idempotency_key": "k"}, {"delay_ms": 0}):
                with pytest.raises(InvalidArgument):
                    await publisher.publish("orders", body, **way)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="'key'"):
            await publisher.publish("split", Order(number=7, customer="ada"))
        assert not await broker.exists("orders")


class UpperCase(PydanticMarshaler):
    def name(self, kind: type) -> str:
        return kind.__name__.upper()


async def test_a_publisher_uses_its_own_marshaler(broker: Broker) -> None:
    async with Publisher(broker, marshaler=UpperCase()) as publisher:
        await publisher.publish("bills", Bill(7))
    (entry,) = await broker.xrange("bills")
    assert b"BILL" in entry.fields.values()
