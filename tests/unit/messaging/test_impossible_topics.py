"""Topic names that can have no companion keys are refused by every kind of subscriber."""

from __future__ import annotations

import pytest

from millstream import open_broker
from millstream.errors import InvalidArgument
from millstream.messaging import HandlerRefused, Message, Router, Subscriber


@pytest.mark.parametrize("name", ["orders.{}", "a}b"])
@pytest.mark.parametrize("group", [None, "g"])
async def test_impossible_topic_name_is_refused(name: str, group: str | None) -> None:
    async with open_broker("local://") as broker:
        subscriber = Subscriber(broker, group=group, group_start=None if group is None else "0")
        with pytest.raises(InvalidArgument):
            subscriber.subscribe(name)


@pytest.mark.parametrize("argument", ["topic", "group", "consumer"])
async def test_name_with_a_lone_surrogate_is_refused(argument: str) -> None:
    names = {"topic": "orders", "group": "g", "consumer": "c", argument: "\ud83d"}
    async with open_broker("local://") as broker:
        with pytest.raises(InvalidArgument, match=argument):
            Subscriber(broker, group=names["group"], consumer=names["consumer"], group_start="0").subscribe(
                names["topic"]
            )


async def handle(message: Message) -> None:
    """Takes whatever comes."""


@pytest.mark.parametrize(("topic", "group"), [("orders", "a}b"), ("orders", "{}b")])
def test_impossible_group_of_partitions_is_refused_when_registered(topic: str, group: str) -> None:
    router = Router(group_start="0")
    router.on(topic, group=group)(handle)
    with pytest.raises(HandlerRefused, match="group"):
        router.on(topic, group=group, partitions=2)(handle)


@pytest.mark.parametrize(("topic", "group"), [("orders", "{a}"), ("{orders}", "a}b")])
def test_group_with_a_hash_tag_may_read_partitions(topic: str, group: str) -> None:
    Router(group_start="0").on(topic, group=group, partitions=2)(handle)
