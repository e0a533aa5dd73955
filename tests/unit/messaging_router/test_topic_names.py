"""Topics that a group reads need names that can have companion keys."""

from __future__ import annotations

import pytest

from millstream import open_broker
from millstream.errors import InvalidArgument
from millstream.messaging import HandlerRefused, Message, Router, Subscriber

IMPOSSIBLE = ["orders.{}", "a}b", "{}orders"]


@pytest.mark.parametrize("topic", IMPOSSIBLE)
async def test_group_refuses_a_topic_that_can_have_no_companion_keys(topic: str) -> None:
    async with open_broker("local://") as broker:
        with pytest.raises(InvalidArgument) as refused:
            Subscriber(broker, group="g", group_start="0").subscribe(topic)
        assert refused.value.argument == "topic"
        with pytest.raises(HandlerRefused):

            @Router(broker).on(topic, group="g", group_start="0")
            async def handle(message: Message) -> None: ...


@pytest.mark.parametrize("topic", ["orders", "{orders}.eu", "orders.{eu}", "a{b"])
async def test_group_accepts_names_with_a_hash_tag_or_without_braces(topic: str) -> None:
    async with open_broker("local://") as broker:
        Subscriber(broker, group="g", group_start="0").subscribe(topic)


async def test_reader_without_a_group_refuses_it_too() -> None:
    async with open_broker("local://") as broker:
        with pytest.raises(InvalidArgument) as refused:
            Subscriber(broker, group=None).subscribe("a}b")
        assert refused.value.argument == "topic"
