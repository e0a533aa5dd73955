"""Common mistakes of beginners: each error names its place and the likely intention."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import pytest

from millstream import Message, Publisher, Router, Subscriber, open_broker
from millstream.cqrs import CommandBus
from millstream.errors import InvalidArgument
from millstream.messaging import HandlerRefused


async def handle(message: Message) -> None: ...


@pytest.mark.parametrize("value", ["text", b"bytes", {"n": 1}, None])
@pytest.mark.parametrize("options", [{}, {"idempotency_key": "k"}, {"delay_ms": 5}])
@pytest.mark.parametrize("codec", ["flat", "raw"])
async def test_values_that_are_not_messages_are_not_published(value: Any, options: Any, codec: str) -> None:
    async with open_broker(f"local://{uuid4().hex}") as broker, Publisher(broker, codec=codec) as publisher:
        with pytest.raises(InvalidArgument, match=r"messages: .* Use Message"):
            await publisher.publish("orders", Message(b"1"), value, **options)
        assert await broker.xlen("orders") == 0


async def test_metadata_are_texts() -> None:
    async with open_broker(f"local://{uuid4().hex}") as broker, Publisher(broker) as publisher:
        with pytest.raises(InvalidArgument, match=r"metadata: \{'attempt': 3\} .* only texts, such as"):
            await publisher.publish("orders", Message(b"1", {"attempt": 3}))  # type: ignore[dict-item]
        assert await broker.xlen("orders") == 0


def test_a_codec_with_a_typo() -> None:
    with pytest.raises(InvalidArgument, match=r"'watermil' is not allowed.*; did you mean 'watermill'\?$"):
        Publisher(open_broker("local://kind"), codec="watermil")
    with pytest.raises(InvalidArgument, match=r"Use flat, json, natricine, raw, watermill\.$"):
        Publisher(open_broker("local://kind"), codec="avro")


@pytest.mark.parametrize(("start", "meant"), [("earliest", "0"), ("Latest", "$"), ("beginning", "0"), (">", "$")])
def test_group_start_accepts_names_of_other_systems(start: str, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"group_start: '{start}' .*for '{start}' that is '{re.escape(meant)}'"):
        Subscriber(open_broker("local://kind"), group="g", group_start=start)
    with pytest.raises(HandlerRefused, match=rf"handle.*start: '{start}' .*that is '{re.escape(meant)}'"):
        Router().add(handle, "flags", start=start)


@pytest.mark.parametrize("url", ["redis:/localhost", "redis:localhost", "localhost:6379", "rediss:/h:1/0"])
def test_an_address_without_its_slashes(url: str) -> None:
    with pytest.raises(InvalidArgument, match="two slashes, as in redis://localhost:6379"):
        open_broker(url)


def test_an_option_with_a_typo() -> None:
    options: Any = {"max_delivries": 3}
    with pytest.raises(HandlerRefused, match=r"handle.*no option 'max_delivries'; did you mean 'max_deliveries'\?$"):
        Router().add(handle, "orders", group="g", group_start="0", **options)
    with pytest.raises(HandlerRefused, match="did you mean 'max_deliveries'"):
        Router(**options).add(handle, "orders", group="g", group_start="0")
    with pytest.raises(HandlerRefused, match=r"no option 'colour'. The options are ack_policy, .*, process_"):
        Router().add(handle, "orders", group="g", group_start="0", colour=1)  # type: ignore[arg-type]

    def register() -> None:
        @CommandBus(open_broker("local://kind")).handler(**options)
        async def greet(command: Command) -> None: ...

    with pytest.raises(HandlerRefused, match="did you mean 'max_deliveries'"):
        register()


class Command:
    pass
