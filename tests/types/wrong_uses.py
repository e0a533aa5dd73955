"""Mistakes that a type checker must report: every line that ends with ``# wrong``, and no other. Never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from pydantic import BaseModel

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.cqrs import CommandBus, Depends

broker: Broker = open_broker("local://")
router = Router(broker, max_in_flight=10, group_start="0")
router = Router(broker, max_inflight=10)  # wrong
router = Router("redis://localhost")  # wrong
bus = CommandBus(broker, max_deliveries=3)
bus = CommandBus(broker, max_delivery=3)  # wrong


@router.on("orders", group="billing", group_start="0", max_deliveries=3, ack_policy="manual")
async def right(message: Message) -> None: ...


@router.on("orders", group="billing", middleware=[], publish_to="bills")
def right_in_a_thread(message: Message) -> list[Message]:
    return [message]


@router.on("orders", group="billing", publish_to="bills")
async def right_with_default(message: Message, limit: int = 3) -> Message | None: ...


class Order(BaseModel):
    number: int


@dataclass
class Bill:
    number: int


class Note(TypedDict):
    text: str


async def open_db() -> int:
    return 1


@router.on("orders", group="billing", publish_to="bills")
async def right_with_a_model(order: Order, db: Annotated[int, Depends(open_db)]) -> Bill:
    return Bill(order.number)


@router.on("notes", group="billing")
def right_with_a_typed_dict(note: Note, message: Message) -> None: ...


@router.on("bills", group="billing")
async def right_with_a_dataclass(bill: Bill) -> list[Bill]:
    return [bill]


@router.on("orders", group="billing", batch=100, linger_ms=20)
async def right_batch(messages: list[Message]) -> None: ...


@router.on({"urgent": 10, "bulk": 1}, group="billing", batch=10, publish_to="bills")
async def right_batch_of_models(orders: list[Order], db: Annotated[int, Depends(open_db)]) -> list[Bill | None]:
    return [Bill(order.number) for order in orders]


@router.on("orders", group="billing", batch=100)  # wrong
async def batch_without_a_list(message: Message) -> None: ...


@router.on("orders", group="billing")  # wrong
async def list_without_a_batch(messages: list[Message]) -> None: ...


@router.on("orders", group="billing", batch="many")  # wrong
async def batch_of_a_text(messages: list[Message]) -> None: ...


@router.on(["urgent", "bulk"], group="billing")  # wrong
async def without_weights(message: Message) -> None: ...


@router.on("orders", group="billing", max_delivries=3)  # wrong
async def misspelt(message: Message) -> None: ...


@router.on("orders", group="billing", max_deliveries="3")  # wrong
async def wrong_type(message: Message) -> None: ...


@router.on("orders", group=5)  # wrong
async def wrong_group(message: Message) -> None: ...


@router.on("orders", group="billing", middleware=[5])  # wrong
async def wrong_middleware(message: Message) -> None: ...


@router.on("orders", group="billing")  # wrong
async def takes_a_number(number: int) -> None: ...


@router.on("orders", group="billing")  # wrong
async def takes_bytes(payload: bytes) -> None: ...


@router.on("orders", group="billing")  # wrong
async def takes_nothing() -> None: ...


@router.on("orders", group="billing")  # wrong
async def returns_a_number(message: Message) -> int:
    return 3


@bus.handler(max_delivries=3)  # wrong
async def misspelt_in_a_bus(command: Any) -> None: ...


@router.on("orders", group="billing", close_timeout_ms=3_000)  # wrong
async def closing_alone(message: Message) -> None: ...


@bus.handler(close_timeout_ms=3_000)  # wrong
async def closing_alone_in_a_bus(command: Any) -> None: ...


async def publishes(publisher: Publisher) -> None:
    await publisher.publish("orders", Message(b"1"), delay_ms=10)
    await publisher.publish("orders", Order(number=1), Bill(2), idempotency_key="k")
    await publisher.publish("orders", "text")  # wrong
    await publisher.publish("orders", {"number": 1})  # wrong
    await publisher.publish("orders", [Order(number=1)])  # wrong
    await publisher.publish("orders", Message("text"))  # wrong
    await publisher.publish("orders", Message(b"1", {"attempt": 3}))  # wrong
    await publisher.publish("orders", Message(b"1"), delay=10)  # wrong
