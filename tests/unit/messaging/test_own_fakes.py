"""Custom brokers: a router, a publisher and a bus run on any object that fits ``BrokerProtocol``."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

from counting_broker import CountingBroker

from millstream import Broker, Message, Publisher, Router, open_broker
from millstream.cqrs import CommandBus
from millstream.testing import eventually


@dataclass
class Greet:
    name: str


async def test_router_runs_on_a_custom_broker() -> None:
    async with open_broker(f"local://{uuid4().hex}") as inside:
        broker = CountingBroker(inside)
        handled: list[bytes] = []
        router = Router(broker)

        @router.on("orders", group="billing", group_start="0", publish_to="bills")
        async def bill(message: Message) -> Message:
            handled.append(message.payload)
            return Message(b"bill of " + message.payload)

        async with router, Publisher(broker) as publisher:
            await publisher.publish("orders", Message(b"1"), Message(b"2"))
            await publisher.publish("orders", Message(b"3"), idempotency_key="three")
            await eventually(lambda: len(handled) == 3)
        assert sorted(handled) == [b"1", b"2", b"3"]
        assert await inside.xlen("bills") == 3
        assert broker.asked["append_unique"] == 1


async def test_operation_that_a_custom_broker_refuses_is_retried() -> None:
    async with open_broker(f"local://{uuid4().hex}") as inside:
        broker = CountingBroker(inside, refuses="wait_for_streams", times=2)
        handled: list[str] = []
        bus = CommandBus(broker)

        @bus.handler
        async def greet(command: Greet) -> None:
            handled.append(command.name)

        async with bus:
            await bus.send(Greet("you"))
            await eventually(lambda: handled == ["you"])
        assert broker.asked["wait_for_streams"] >= 3


async def test_fanout_needs_no_further_methods_of_a_custom_broker() -> None:
    async with open_broker(f"local://{uuid4().hex}") as inside:
        broker = CountingBroker(inside)
        handled: list[bytes] = []
        router = Router(broker)

        @router.on("flags", start="0", publish_to="seen")
        async def flag(message: Message) -> Message:
            handled.append(message.payload)
            return message.copy()

        await inside.xadd("flags", {"payload": b"on"})
        async with router:
            await eventually(lambda: handled == [b"on"])


def test_broker_implements_the_protocol() -> None:
    assert {"context", "transport", "run"} <= {*dir(Broker), *vars(open_broker("local://fits"))}
