"""``keep=`` and ``delete_acked=``: what may be written, and which combinations are refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from millstream.cqrs import EventBus
from millstream.errors import InvalidArgument
from millstream.messaging import Message, RetentionPolicy, Router
from millstream.messaging.handler import HandlerRefused
from millstream.messaging.housekeeping import ContradictingPolicies, kept_streams

POLICY = RetentionPolicy(max_len=10)


@dataclass
class UserCreated:
    name: str


async def ignore(message: Message) -> None:
    """A handler for routes that are never run."""


def router(*routes: dict[str, Any], **defaults: Any) -> Router:
    made = Router(group_start="0", **defaults)
    for route in routes:
        made.add(ignore, route.pop("topic", "orders"), **route)
    return made


def policies(made: Router) -> dict[str, str]:
    return {name: str(stream.policy) for name, stream in kept_streams(made.routes()).items()}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"keep": "7d"}, "max_age_ms=604800000"),
        ({"keep": POLICY}, "max_len=10"),
        ({"delete_acked": True}, "delete_acked"),
        ({"keep": "1h", "delete_acked": True}, "max_age_ms=3600000 delete_acked"),
        ({"keep": RetentionPolicy(max_len=10, delete_acked=True)}, "max_len=10 delete_acked"),
        ({"keep": None}, None),
        ({"delete_acked": False}, None),
        ({}, None),
    ],
)
def test_options_become_a_policy(options: dict[str, Any], policy: str | None) -> None:
    assert policies(router({"group": "a", **options})) == ({} if policy is None else {"orders": policy})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"keep": "soon"}, "keep"),
        ({"keep": 7}, "keep"),
        ({"keep": {"max_age": "7d"}}, "keep"),
        ({"delete_acked": "yes"}, "delete_acked"),
        ({"delete_acked": True, "group": None}, "delete_acked"),
        ({"keep": "7d", "topic": "a}b", "group": None}, "keep"),
    ],
)
def test_options_that_cannot_work_are_refused_at_registration(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(HandlerRefused, match=argument):
        router({"group": "a", **options})


def test_delete_acked_and_keep_acked_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match="keep_acked_ms"):
        RetentionPolicy(keep_acked_ms=10, delete_acked=True)


def test_a_route_overrides_the_router() -> None:
    made = router(
        {"topic": "a", "group": "g"},
        {"topic": "b", "group": "g", "keep": "1d"},
        {"topic": "c", "group": "g", "keep": None},
        {"topic": "d", "delete_acked": False, "start": "$"},
        keep="7d",
        delete_acked=True,
    )
    assert policies(made) == {
        "a": "max_age_ms=604800000 delete_acked",
        "b": "max_age_ms=86400000 delete_acked",
        "c": "delete_acked",
        "d": "max_age_ms=604800000",
    }


def test_an_included_router_takes_the_policy_of_the_including_router() -> None:
    outer = Router(keep="7d")
    outer.include(router({"group": "a"}, {"topic": "bills", "group": "a", "keep": "1d"}))
    assert policies(outer) == {"orders": "max_age_ms=604800000", "bills": "max_age_ms=86400000"}


def test_a_bus_passes_the_policy_on_to_its_topics() -> None:
    bus = EventBus(None, service="shop", group_start="0", keep="7d")  # type: ignore[arg-type]  # it is never run

    @bus.handler
    async def welcome(event: UserCreated) -> None:
        """It is never run."""

    made = Router()
    made.include(bus)
    assert list(policies(made).values()) == ["max_age_ms=604800000"]


def test_every_partition_has_the_policy() -> None:
    made = router({"group": "a", "partitions": 3, "keep": POLICY})
    assert policies(made) == {f"orders.p{number}": "max_len=10" for number in range(3)}


def test_all_groups_of_a_stream_are_declared_also_those_without_a_policy() -> None:
    made = router({"group": "a", "keep": POLICY}, {"group": "b"})
    assert kept_streams(made.routes())["orders"].groups == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"group": "a", "keep": "7d"}, {"group": "b", "keep": "1d"}),
        ({"group": "a", "keep": "7d"}, {"group": "b", "keep": None}),
        ({"group": "a", "delete_acked": True}, {"group": "b", "keep": "7d"}),
        ({"group": "a", "delete_acked": True}, {"start": "$"}),
        ({"start": "$"}, {"group": "a", "delete_acked": True}),
    ],
)
def test_policies_that_contradict_each_other_name_both_handlers(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(ContradictingPolicies) as refused:
        kept_streams(router(first, second).routes())
    assert all("test_retention_options" in place for place in refused.value.places)


def test_equal_policies_written_differently_do_not_contradict() -> None:
    same = RetentionPolicy(max_age_ms=604_800_000)
    assert policies(router({"group": "a", "keep": "7d"}, {"group": "b", "keep": same})) == {
        "orders": "max_age_ms=604800000"
    }


def test_dead_letter_streams_are_not_trimmed(caplog: pytest.LogCaptureFixture) -> None:
    made = router(
        {"group": "a", "dlq": "failed"},
        {"topic": "failed", "group": "r"},
        {"topic": "{x}.dlq", "group": "r"},
        keep="1d",
    )
    with caplog.at_level(logging.WARNING, "millstream.retention"):
        assert policies(made) == {"orders": "max_age_ms=86400000"}
    assert caplog.text.count("holds dead letters") == 2
